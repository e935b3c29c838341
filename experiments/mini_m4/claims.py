"""Tabulates what the paper's claims are about: loss and BLEU by resource, of each point and seed.

    python experiments/mini_m4/claims.py runs/mini_m4/grid --baselines=runs/mini_m4/baselines.json

Training loss: cross entropy (nats per target piece), mean over the last tenth of the steps.
Held-out: on validation text, by thirds of the languages. Test: of the whole test split, as are BLEU
and delta BLEU (against bilingual models), which are means over languages.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from gshard_exp.score.quality import Baselines
from gshard_exp.sweep import report, tables
from gshard_exp.sweep.runs import Run
from gshard_exp.sweep.scores import HELD_OUT_LOSS

Value = Callable[[Run], float | None]


def training_loss(run: Run) -> float:
    """Average the last tenth of the curve."""
    last = run.curve[-max(1, len(run.curve) // 10) :]
    return sum(loss for _, loss in last) / len(last)


def held_out(group: str) -> Value:
    """Return the last held-out loss of a third of the languages."""
    return lambda run: run.held_out[-1].get(f"{HELD_OUT_LOSS}/{group}")


def mean(metric: str, group: str = "macro") -> Value:
    """Return a score's mean over languages."""
    return lambda run: run.scores and run.scores.average(metric, group)


COLUMNS: tuple[tuple[str, str, Value], ...] = (
    ("training loss", ".3f", training_loss),
    ("held-out", ".3f", report.held_out_loss),
    ("held-out high", ".3f", held_out("high")),
    ("held-out middle", ".3f", held_out("middle")),
    ("held-out low", ".3f", held_out("low")),
    ("test", ".3f", lambda run: run.scores and run.scores.cross_entropy),
    ("BLEU", ".1f", mean("bleu")),
    ("BLEU high", ".1f", mean("bleu", "high")),
    ("BLEU middle", ".1f", mean("bleu", "middle")),
    ("delta BLEU", "+.1f", mean("delta_bleu")),
    ("core-h", ".3f", lambda run: run.core_hours),
)


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the sweep")
    parser.add_argument("--baselines", help="as `sweep eval --baselines_to` writes them")
    arguments = parser.parse_args()
    baselines = arguments.baselines and Baselines.read(arguments.baselines)
    found = report.collect([arguments.folder], baselines=baselines)
    for text in (*(f"{one.where}: {one.what}" for one in found.damage), *found.notes):
        print(text, file=sys.stderr)
    heads = ("point", *(head for head, _, _ in COLUMNS))
    rows = [
        (run.name, *(report.written(of(run), form) for _, form, of in COLUMNS))
        for run in found.runs
        if run.held_out and run.curve
    ]
    print(tables.markdown(tables.Table("claims", "", heads, heads, rows, rows)))


if __name__ == "__main__":
    main()

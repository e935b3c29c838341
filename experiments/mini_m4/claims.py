"""Tabulates what the paper's claims are about: loss and BLEU by resource, of each point and seed.

    python experiments/mini_m4/claims.py runs/mini_m4/grid --baselines=runs/mini_m4/baselines.json

Training loss: cross entropy (nats per target piece), mean over the last tenth of the steps.
Held-out: on validation text, by thirds of the languages. Test: of the whole test split, as are BLEU
and delta BLEU (against bilingual models), which are means over languages.
"""

import argparse
import json
from pathlib import Path

from gshard_exp.score.quality import Baselines
from gshard_exp.sweep import report, tables
from gshard_exp.sweep.runs import HELD_OUT_LOSS, Run

GROUPS = ("high", "middle", "low")
HEADS = (
    "point",
    "training loss",
    "held-out",
    *(f"held-out {group}" for group in GROUPS),
    "test",
    "BLEU",
    *(f"BLEU {group}" for group in GROUPS[:2]),
    "delta BLEU",
    "core-h",
)


def training_loss(run: Run) -> float:
    """Average the last tenth of the curve."""
    last = run.curve[-max(1, len(run.curve) // 10) :]
    return sum(loss for _, loss in last) / len(last)


def test_loss(run: Run) -> float | None:
    """Return the cross entropy of the reference translations; None where no `eval` found it."""
    if run.scores is None:
        return None
    scores = json.loads((run.folder / run.scores.source).read_text())
    return scores.get("teacher_forced", {}).get(HELD_OUT_LOSS)


def values(run: Run) -> list[float | None]:
    """Return what stands in a row, in the order of `HEADS[1:]`."""
    line = run.held_out[-1]
    scores = run.scores
    keys = (HELD_OUT_LOSS, *(f"{HELD_OUT_LOSS}/{group}" for group in GROUPS))
    averages = [("bleu", "macro"), ("bleu", "high"), ("bleu", "middle"), ("delta_bleu", "macro")]
    return [
        training_loss(run),
        *(line.get(key) for key in keys),
        test_loss(run),
        *(scores and scores.average(*average) for average in averages),
        run.core_hours,
    ]


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the sweep")
    parser.add_argument("--baselines", help="as `sweep eval --baselines_to` writes them")
    arguments = parser.parse_args()
    baselines = arguments.baselines and Baselines.read(arguments.baselines)
    found = report.collect([arguments.folder], baselines=baselines)
    forms = [".3f"] * 6 + [".1f"] * 3 + ["+.1f", ".3f"]
    rows = [
        (run.name, *(map(report.written, values(run), forms)))
        for run in found.runs
        if run.held_out and run.curve
    ]
    print(tables.markdown(tables.Table("claims", "", HEADS, HEADS, rows, rows)))


if __name__ == "__main__":
    main()

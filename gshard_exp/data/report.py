"""What the verbs `corpus` and `tasks` print."""

import itertools
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gshard_exp.data import languages, splits
from gshard_exp.data.tasks import TranslationTasks

SHOWN_PROBLEMS = 20


def print_corpus(tasks: TranslationTasks, console: Console | None = None) -> None:
    """Build the corpus if need be and print what cleaning and splitting did to it.

    Args:
      tasks: the assembled tasks; only their corpus is looked at.
      console: where to; standard output by default.
    """
    console = console or Console()
    built = tasks.built
    report = built.report
    table = Table(title="Sources", title_justify="left")
    for heading in ("source", "pairs read", "pairs kept"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for row in report["sources"]:
        table.add_row(escape(row["source"]), f"{row['pairs']:,}", f"{row['kept']:,}")
    console.print(table)
    console.print(_counts("Repaired, pairs by rule", report["repaired"]))
    console.print(_counts("Refused, pairs by rule", report["refused"]))
    totals = {
        split: sum(built.num_pairs(split, code) for code in built.languages)
        for split in splits.SPLITS
    }
    console.print(
        f"{report['pairs_read']:,} pairs read, kept in {len(built.languages)} languages: "
        + ", ".join(f"{split} {count:,}" for split, count in totals.items())
    )
    _print_notes(report, console)
    console.print(f"Corpus: {built.directory}", soft_wrap=True)


def _counts(title: str, counts: Mapping[str, int]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("rule")
    table.add_column("pairs", justify="right")
    for rule, count in counts.items():
        table.add_row(rule.replace("_", " "), f"{count:,}")
    return table


def _print_notes(report: Mapping, console: Console) -> None:
    left_out = report["languages_left_out"]
    if left_out:
        listed = ", ".join(f"{code} ({count})" for code, count in left_out.items())
        console.print(
            f"Left out, fewer than min_pairs={report['min_pairs']} training pairs: {listed}"
        )
    if report["languages_without_a_row"]:
        console.print(
            "Not in the table of languages, so no script rule was applied: "
            + ", ".join(report["languages_without_a_row"])
        )
    problems = report["problems"]
    if problems["count"]:
        console.print(f"{problems['count']:,} lines or files could not be read:")
        for line in problems["first"][:SHOWN_PROBLEMS]:
            console.print(f"  {escape(line)}", soft_wrap=True)
        if problems["count"] > SHOWN_PROBLEMS:
            console.print("  ... (the first ones are in report.json)")


def print_tasks(tasks: TranslationTasks, samples: int = 2, console: Console | None = None) -> None:
    """Print languages, pairs per split, script, share of the mixture and samples.

    Args:
      tasks: the assembled tasks; their corpus is built if need be, vocabularies are not.
      samples: training pairs shown per language.
      console: where to; standard output by default.
    """
    console = console or Console()
    built, rates = tasks.built, tasks.rates()
    table = Table(title=f"Mixture {tasks.prefix}, T = {tasks.temperature:g}", title_justify="left")
    for heading in ("task", "language", "script"):
        table.add_column(heading)
    for heading in (*splits.SPLITS, "drawn"):
        table.add_column(heading, justify="right")
    names = languages.read_table(tasks.corpus.table)
    for code in tasks.codes:
        row = names.get(code)
        table.add_row(
            tasks.task_name(code),
            row.name if row else code,
            ", ".join(row.scripts) if row and row.scripts else "no rule",
            *(f"{built.num_pairs(split, code):,}" for split in splits.SPLITS),
            f"{rates[code]:.2%}",
        )
    console.print(table)
    for code in tasks.codes:
        # Spread over the file: its beginning is one package's.
        step = max(built.num_pairs(splits.TRAIN, code) // (samples + 1), 1)
        every = itertools.islice(built.pairs(splits.TRAIN, code), step - 1, None, step)
        for source, target in itertools.islice(every, samples):
            console.print(escape(f"[{code}] {source}  =  {target}"), highlight=False)
    console.print(
        f"{len(tasks.codes)} languages into English, "
        + ", ".join(
            f"{sum(built.num_pairs(split, code) for code in tasks.codes):,} {split}"
            for split in splits.SPLITS
        )
        + " pairs"
    )

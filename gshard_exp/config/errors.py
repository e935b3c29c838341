"""The error of this room: four parts, no traceback. Imports nothing of ours."""

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """Report a mistake in a gin file or a flag; the command line prints it and exits with 2.

    Args:
        problem: what is wrong, with the actual numbers and names, as whole sentences.
        rule: the rule that it breaks; empty where the problem says it all.
        at: where it was set, one entry a place: `gin/models/tiny.gin:14`,
            `command line: --gin.X=3`.
        hint: what to try.
    """

    def __init__(
        self, problem: str, *, rule: str = "", at: Sequence[str] = (), hint: str = ""
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.rule = rule
        self.at = tuple(dict.fromkeys(at))
        self.hint = hint

    def __str__(self) -> str:
        lines = [f"{self.problem} {self.rule}".strip()]
        lines += [f"  set at: {place}" for place in self.at]
        if self.hint:
            lines.append(f"  try: {self.hint}")
        return "\n".join(lines)


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """List the known names that look most like `name`, best first.

    Letter case does not count. Of dotted names the last parts may be alike (`Modle` is near
    `seq2seq.Model`).
    """

    def likeness(one: str, other: str) -> float:
        return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()

    def distance(other: str) -> tuple[float, str]:
        last = likeness(name.rsplit(".", 1)[-1], other.rsplit(".", 1)[-1])
        return -max(likeness(name, other), last), other

    return sorted(set(known), key=distance)[:count]


def one_of(names: Sequence[str]) -> str:
    """Join names for a sentence: `a, b or c`."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} or {names[-1]}"

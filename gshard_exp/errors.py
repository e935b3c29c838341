"""The error that every room raises for a wrong setting, checks that raise it, exit statuses.

Imports nothing of ours.

Rooms do not know gin files or flags. They say which of their own fields are wrong; `config/`
knows who set them and adds `file.gin:14` before the user reads the message.
"""

from collections.abc import Iterable

# Exit statuses of the command line: the run failed, a wrong setting, stopped by the user.
FAILED, WRONG_SETTING, STOPPED = 1, 2, 130


class SettingError(ValueError):
    """Say that settings, alone or together, cannot work.

    Raise it from `__post_init__`, or later from any function that validates. The text holds the
    actual numbers and the rule; where the numbers were set is appended by `config/`.

    Args:
        problem: what is wrong, with the actual numbers, and the rule, as whole sentences.
        settings: the fields to blame, most to blame first: names of fields of the object that
            raises (`'group_size'`), or dotted paths below it (`'encoder.group_size'`).
        hint: what to try, as whole sentences; empty if there is nothing to say.
    """

    def __init__(self, problem: str, settings: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.settings = settings
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.problem} {self.hint}".strip()

    def __reduce__(self):
        # Python would pickle an exception with its text alone.
        return type(self), (self.problem, self.settings, self.hint)


def first_line(error: Exception) -> str:
    """Return the first line of what an error says that says anything; its type if none does."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def require_at_least(owner: object, minimum: float, *fields: str) -> None:
    """Refuse fields of an object below a minimum; a field that is None is left alone.

    Raises:
        SettingError: names the field.
    """
    for field in fields:
        value = getattr(owner, field)
        if value is not None and not value >= minimum:
            raise SettingError(f"{field}={value} has to be at least {minimum}.", (field,))


def require_within(owner: object, low: float, high: float, *fields: str) -> None:
    """Refuse fields of an object outside [low, high).

    Raises:
        SettingError: names the field.
    """
    for field in fields:
        value = getattr(owner, field)
        if not low <= value < high:
            raise SettingError(
                f"{field}={value} has to be at least {low} and below {high}.", (field,)
            )


def require_positive(owner: object, *fields: str) -> None:
    """Refuse fields of an object that are not above 0; a field that is None is left alone.

    Raises:
        SettingError: names the field.
    """
    for field in fields:
        value = getattr(owner, field)
        if value is not None and not value > 0:
            raise SettingError(f"{field}={value} has to be above 0.", (field,))


def require_one_of(owner: object, known: Iterable[str], field: str) -> None:
    """Refuse a field of an object that is none of the known names.

    Raises:
        SettingError: names the field and the known names.
    """
    value, known = getattr(owner, field), tuple(known)
    if value not in known:
        raise SettingError(
            f"{field}={value!r} is not known: there are {', '.join(known)}.",
            (field,),
            hint="Set one of them.",
        )

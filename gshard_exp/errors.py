"""The error that every room raises for a wrong setting. Imports nothing of ours.

Rooms do not know gin files or flags. They say which of their own fields are wrong; `config/`
knows who set them and adds `file.gin:14` before the user reads the message.
"""


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

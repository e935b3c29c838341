"""Our tasks in a gin file of t5x."""

from typing import Any

from gshard_exp.data.tasks import TranslationTasks


def mixture(tasks: TranslationTasks) -> str:
    """Make the tasks known to seqio, building what is not built yet; return the mixture's name."""
    return tasks.register()


def vocabulary(tasks: TranslationTasks, feature: str) -> Any:
    """Return seqio's vocabulary of `inputs` or `targets`."""
    return tasks.output_features()[feature].vocabulary

"""Accuracy of an image classifier on held-out images."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from gshard_exp import axes
from gshard_exp.data.batches import to_mesh
from gshard_exp.data.digits import digits
from gshard_exp.errors import require_at_least
from gshard_exp.model.contract import Params
from gshard_exp.model.vision import ImageClassifier
from gshard_exp.sharding.annotate import partitioning
from gshard_exp.sharding.rules import Rules


@dataclasses.dataclass(frozen=True)
class HeldOutDigits:
    """Score the digits that training does not see.

    Attributes:
        batch_size: images at once.
        every_steps: steps between evaluations.
        at_start: also before the first step, to compare with.
        name: folder below `training_eval/`.
    """

    batch_size: int
    every_steps: int
    at_start: bool = False
    name: str = "held_out"

    def __post_init__(self) -> None:
        require_at_least(self, 1, "batch_size", "every_steps")

    @property
    def lengths(self) -> Mapping[str, int]:
        """Return nothing: the model leaves no length open."""
        return {}

    def __call__(
        self, params: Params, *, model: ImageClassifier, mesh: Mesh, rules: Rules, folder: Path
    ) -> tuple[dict[str, float], str]:
        """Score; see `train.experiment.Evaluator`."""
        del folder
        images, labels = digits("held_out")
        names = {"images": (axes.BATCH, axes.IMAGE_ROWS, axes.IMAGE_COLUMNS, None)}
        found = []
        for start in range(0, len(images), self.batch_size):
            part = images[start : start + self.batch_size]
            missing = self.batch_size - len(part)
            padded = np.pad(part, [(0, missing), (0, 0), (0, 0), (0, 0)])
            placed = to_mesh({"images": padded}, mesh, rules, names)
            logits_BV = _logits(params, placed["images"], model=model, mesh=mesh, rules=rules)
            found.append(np.asarray(logits_BV)[: len(part)])
        right = np.argmax(np.concatenate(found), axis=-1) == labels
        text = f"held-out digits: {right.sum()} of {len(right)} right, {right.mean():.1%}"
        return {"accuracy": float(right.mean())}, f"{text}\n"


@functools.partial(jax.jit, static_argnames=("model", "mesh", "rules"))
def _logits(params: Params, images, *, model: ImageClassifier, mesh: Mesh, rules: Rules):
    with partitioning(mesh, rules):
        return model.logits(params, images)

"""Handwritten digits that come with scikit-learn: 1,797 images of 8 x 8 pixels, ten classes.

Source: `sklearn.datasets.load_digits`, the test part of the UCI data set "Optical Recognition of
Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998).
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gshard_exp.data.batches import HostBatch, check_identity, write_identity
from gshard_exp.errors import SettingError, require_at_least

_BRIGHTEST = 16.0
_SPLIT_SEED = 0


@dataclasses.dataclass(frozen=True)
class Digits:
    """Batches of digits: each epoch all training images in a new order, shifted by up to a pixel.

    Every fifth image of a fixed permutation is held out. What an epoch leaves after its last whole
    batch is dropped.

    Attributes:
        seed: of order and shifts; batch i depends on (seed, i) alone.
        max_shift: pixels, in both directions; what is shifted in is black.
    """

    seed: int = 0
    max_shift: int = 1

    def __post_init__(self) -> None:
        require_at_least(self, 0, "max_shift")

    def train_batches(self, *, batch_size: int, lengths: Mapping[str, int]) -> "DigitBatches":
        """Open the stream at its start."""
        del lengths
        return DigitBatches(self, batch_size)

    def vocab_sizes(self) -> Mapping[str, int]:
        """Return nothing: there are no vocabularies."""
        return {}

    def write_model_files(self, model_dir: Path) -> None:
        """Keep nothing: scikit-learn has the held-out images."""


class DigitBatches:
    """The stream of `Digits`; its position is the number of batches drawn."""

    def __init__(self, data: Digits, rows: int) -> None:
        self._data, self._rows = data, rows
        self._images, self._labels = digits("train")
        self._per_epoch = len(self._images) // rows
        if not self._per_epoch:
            raise SettingError(
                f"batch_size={rows} is more than the {len(self._images)} training images.",
                settings=("batch_size",),
            )
        self._drawn = 0
        self.identity = {**dataclasses.asdict(data), "batch_size": rows, "data": "digits"}

    def __next__(self) -> HostBatch:
        epoch, index = divmod(self._drawn, self._per_epoch)
        order = np.random.default_rng((self._data.seed, epoch)).permutation(len(self._images))
        chosen = order[index * self._rows : (index + 1) * self._rows]
        rng = np.random.default_rng((self._data.seed, epoch, index))
        self._drawn += 1
        images = self._shifted(self._images[chosen], rng)
        return {"images": images, "labels": self._labels[chosen]}

    def _shifted(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        most, size = self._data.max_shift, images.shape[1]
        padded = np.pad(images, [(0, 0), (most, most), (most, most), (0, 0)])
        corners = rng.integers(0, 2 * most + 1, (len(images), 2))
        return np.stack(
            [
                image[row : row + size, column : column + size]
                for image, (row, column) in zip(padded, corners, strict=True)
            ]
        )

    def save(self, folder: Path) -> None:
        """Write the count."""
        write_identity(folder, self.identity)
        (folder / "position.json").write_text(json.dumps({"drawn": self._drawn}))

    def restore(self, folder: Path) -> None:
        """Read the count."""
        check_identity(folder, self.identity)
        self._drawn = json.loads((folder / "position.json").read_text())["drawn"]


@functools.cache
def digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images of a split and what they show.

    Args:
        split: `train` or `held_out`.

    Returns:
        float32 [N, 8, 8, 1] in [0, 1], and int32 [N].

    Raises:
        SettingError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SettingError(
            "the digits come with scikit-learn, which is not installed.",
            settings=("data",),
            hint="pip install 'gshard_exp[vision]'",
        ) from error
    found = load_digits()
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(found.target))
    held_out = np.arange(len(order)) % 5 == 0
    chosen = order[held_out if split == "held_out" else ~held_out]
    images = (found.images[chosen] / _BRIGHTEST).astype(np.float32)[..., None]
    return images, found.target[chosen].astype(np.int32)

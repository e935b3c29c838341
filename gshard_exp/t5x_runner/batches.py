"""Our stream of batches as t5x takes it in."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from clu.data.dataset_iterator import ArraySpec, DatasetIterator

from gshard_exp.data.batches import BatchIterator
from gshard_exp.train.experiment import Experiment

OF_PACKING = ("segment_ids", "positions")


class OurBatches(DatasetIterator):
    """The batches of an experiment, with a position that t5x saves in its checkpoints."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._batches = self._at_start()

    def _at_start(self) -> BatchIterator:
        experiment = self._experiment
        return experiment.data.train_batches(
            batch_size=experiment.batch_size, lengths=experiment.lengths
        )

    def __next__(self) -> Mapping[str, np.ndarray]:
        return next(self._batches)

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the batches are of, for run.json."""
        return self._batches.identity

    @property
    def element_spec(self) -> dict[str, ArraySpec]:
        """Describe a batch; rows that are not packed have neither segments nor positions."""
        entries = self._experiment.model.batch_entries(
            self._experiment.batch_size, self._experiment.lengths
        )
        packed = getattr(self._experiment.data, "pack", True)
        return {
            key: ArraySpec(np.dtype(entry.dtype), entry.shape)
            for key, entry in entries.items()
            if packed or not key.endswith(OF_PACKING)
        }

    def reset(self) -> None:
        """Go to the start."""
        self._batches = self._at_start()

    def save(self, filename: Any) -> None:
        """Write the position into a folder of that name."""
        folder = Path(filename)
        folder.mkdir()
        # t5x looks at the first batch before it saves step 0, whose next batch is the first still.
        first = folder.parent.parent.name.split(".")[0] == "checkpoint_0"
        (self._at_start() if first else self._batches).save(folder)

    def restore(self, filename: Any) -> None:
        """Go to a position that `save` wrote."""
        self._batches.restore(Path(filename))

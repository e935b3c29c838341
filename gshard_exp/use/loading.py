"""Open the folder of a run: from its config and checkpoint to a translator."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from gshard_exp import axes
from gshard_exp.config import ConfigError, assemble
from gshard_exp.data.model_files import ModelFiles
from gshard_exp.data.tasks import TranslationTasks
from gshard_exp.data.tokens import INPUTS, TARGETS
from gshard_exp.errors import SettingError
from gshard_exp.model.contract import Params
from gshard_exp.model.incremental import StepDecoder
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.score.beam import BeamSearch
from gshard_exp.score.bleu import Bleu, ChrF, Metric
from gshard_exp.score.translator import Translator
from gshard_exp.train.checkpoint import restore_params
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.state import placed_params


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A trained model and all that its folder says of it.

    Attributes:
        experiment: as its config.gin sets it up, with the bindings of the call.
        model: of the experiment, one that translates.
        step: whose parameters these are.
        params: on the mesh of `translator`.
        files: vocabularies, languages and held-out text.
        translator: of these parameters.
    """

    experiment: Experiment
    model: Seq2SeqModel
    step: int
    params: Params
    files: ModelFiles
    translator: Translator

    def metrics(self, language: str) -> Sequence[Metric]:
        """Return the metric functions of a language's task; BLEU and chrF where it has none."""
        tasks = getattr(self.experiment.data, "tasks", None)
        found = tasks.metrics(language) if isinstance(tasks, TranslationTasks) else ()
        return found or (Bleu(), ChrF())


def load_translator(
    model_dir: str | Path,
    *,
    step: int | None = None,
    bindings: Sequence[str] = (),
    batch_size: int | None = None,
) -> Translator:
    """Load a trained model to translate with.

        translator = load_translator("runs/quickstart")
        for translation in translator.translate(["Guten Morgen", "Habari"]):
            print(translation.score, translation.text)

    Needs neither the corpus nor seqio. The mesh is that of the run unless bindings say otherwise:
    a model can be loaded on any mesh, whatever mesh trained it.

    Args:
        model_dir: folder of a run.
        step: of the checkpoint; None: the newest.
        bindings: gin bindings that win over the run's config.gin: "BEAM_SIZE=1",
            "DATA_PARTITIONS=1", "MAX_DECODE_LENGTH=128".
        batch_size: sentences at once; None: 32, or the next multiple of the mesh's partitions.

    Raises:
        SettingError, ConfigError: what is missing in the folder, or does not fit.
    """
    return open_model(model_dir, step=step, bindings=bindings, batch_size=batch_size).translator


def open_model(
    model_dir: str | Path,
    *,
    step: int | None = None,
    bindings: Sequence[str] = (),
    batch_size: int | None = None,
) -> OpenedModel:
    """Open the folder of a run; arguments as `load_translator`."""
    folder = Path(model_dir).expanduser()
    config = folder / "config.gin"
    if not config.exists():
        raise SettingError(
            f"{folder} is not the folder of a run: there is no {config}.",
            settings=("model_dir",),
            hint="Give the MODEL_DIR of a training run.",
        )
    assembled = assemble(Experiment, [str(config)], bindings)
    experiment = assembled.tree
    model = experiment.model
    if not isinstance(model, Seq2SeqModel):
        raise SettingError(
            f"{folder} holds a {type(model).__name__}, which translates nothing.",
            settings=("model_dir",),
            hint="Give the MODEL_DIR of a run with a Seq2SeqModel.",
        )
    mesh, placed = _placed(experiment)
    step, params = restore_params(folder, step, placed)
    module = model.module
    files = ModelFiles(folder)
    translator = Translator(
        decoder=StepDecoder.of(model, params),
        search=experiment.search or BeamSearch(),
        vocabularies={
            INPUTS: files.vocabulary(INPUTS, module.source_embedding.vocab_size),
            TARGETS: files.vocabulary(TARGETS, module.target_embedding.vocab_size),
        },
        lengths=experiment.lengths,
        mesh=mesh,
        rules=experiment.rules,
        batch_size=batch_size or _batch_size(experiment, mesh),
        languages={language.code: language.name for language in files.languages},
    )
    return OpenedModel(experiment, model, step, params, files, translator)


def _placed(experiment: Experiment) -> tuple[Mesh, Any]:
    """Build the mesh and lay the parameters out on it; shapes and shardings, no arrays."""
    try:
        mesh = experiment.mesh.build()
        return mesh, placed_params(experiment.model, mesh, experiment.rules)
    except SettingError as error:
        raise ConfigError(
            error.problem,
            hint=f"{error.hint} Any mesh will do: --gin.DATA_PARTITIONS=1 "
            "--gin.NUM_EXPERT_PARTITIONS=1 --gin.NUM_MODEL_PARTITIONS=1 is one device.",
        ) from error


def _batch_size(experiment: Experiment, mesh: Any) -> int:
    parts = experiment.rules.partitions(axes.BATCH, mesh)
    return parts * math.ceil(Translator.batch_size / parts)

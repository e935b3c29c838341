"""Parts of an experiment as fiddle configs, for the presets and for builders of one's own.

What gin files say in `gin/models`, `gin/sharding` and `gin/runs` is said here in Python; a test
holds the two to the same trees. Routing presets (`gin/moe`) and the default data (`gin/tasks`) are
read from their files, where the sources of their settings stand.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import fiddle as fdl
from fiddle import history, selectors

from gshard_exp import axes
from gshard_exp.config.assemble import Assembled
from gshard_exp.config.reading import read_files
from gshard_exp.config.to_fiddle import fiddle_config, of_gin
from gshard_exp.data.batches import RandomData
from gshard_exp.model.layers import Embedding, FeedForward, MultiHeadAttention
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.model.transformer import DecoderBlock, EncoderBlock, Stack, Transformer
from gshard_exp.moe.dispatch import EinsumDispatch
from gshard_exp.moe.layer import MoeLayer
from gshard_exp.score.flat_beam import FlatBeamSearch
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.sharding.rules import Rules
from gshard_exp.train.checkpoint import Checkpoints
from gshard_exp.train.experiment import Experiment, NonFinite
from gshard_exp.train.optimizer import Adafactor, SqrtDecay

# The paper's layout, as gin/sharding/expert_parallel.gin; what is not named is replicated.
_SPLIT: dict[str, str | tuple[str, ...]] = {
    axes.MLP: axes.MODEL,
    axes.HEADS: axes.MODEL,
    axes.EXPERT: axes.EXPERT_AXIS,
    axes.EXPERT_MLP: axes.MODEL,
    axes.BATCH: (axes.DATA, axes.EXPERT_AXIS),
    axes.ACTIVATION_MLP: axes.MODEL,
    axes.ACTIVATION_HEADS: axes.MODEL,
    axes.GROUP: (axes.DATA, axes.EXPERT_AXIS),
    axes.EXPERT_GROUP: axes.DATA,
    axes.IMAGE_ROWS: axes.MODEL,
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a Transformer.

    Attributes:
        layers: of the encoder, and as many of the decoder.
        width: M.
        mlp: H, of dense layers and of each expert.
        heads: number of heads.
        head_dim: width of a head.
        vocabularies: pieces of the source and the target vocabulary.
    """

    layers: int
    width: int
    mlp: int
    heads: int
    head_dim: int
    vocabularies: tuple[int, int] = (64000, 32000)


def dense_model(sizes: Sizes, *, remat: str = "none", dtype: str = "float32") -> fdl.Config:
    """Return a dense `Seq2SeqModel`; as gin/models/transformer.gin."""
    ffn = fdl.Config(FeedForward, mlp_dim=sizes.mlp)
    encoder = _stack(sizes, [_encoder_block(sizes, ffn)], remat)
    decoder = _stack(sizes, [_decoder_block(sizes, ffn)], remat)
    return _model(sizes, encoder, decoder, dtype)


def moe_model(
    sizes: Sizes,
    *,
    experts: int,
    group_size: int,
    routing: str = "gshard",
    dispatch: type = EinsumDispatch,
    remat: str = "none",
    dtype: str = "float32",
) -> fdl.Config:
    """Return the paper's sparse `Seq2SeqModel`; as gin/models/moe_transformer.gin.

    Args:
        sizes: of the Transformer; every other layer is sparse.
        experts: E.
        group_size: S, tokens in a routing group.
        routing: name of a file in gin/moe, see `route`.
        dispatch: class of the dispatch method.
        remat: a key of `recompute.REMAT_POLICIES`.
        dtype: of the activations.
    """
    dense = fdl.Config(FeedForward, mlp_dim=sizes.mlp)
    sparse = fdl.Config(
        MoeLayer,
        num_experts=experts,
        expert_mlp_dim=sizes.mlp,
        group_size=group_size,
        dispatch=fdl.Config(dispatch),
    )
    encoder = _stack(sizes, [_encoder_block(sizes, ffn) for ffn in (dense, sparse)], remat)
    decoder = _stack(sizes, [_decoder_block(sizes, ffn) for ffn in (dense, sparse)], remat)
    model = _model(sizes, encoder, decoder, dtype)
    model.router_z_loss_factor = 0.0
    route(model, routing)
    return model


def route(model: fdl.Config, name: str) -> None:
    """Give the sparse layers of a model the routing of gin/moe/NAME.gin.

    The settings are read from the file, where their sources stand: what that file sets is taken,
    all else of the model stays.

    Raises:
        ConfigError: there is no such file.
    """
    (mlp,) = {layer.expert_mlp_dim for layer in selectors.select(model, MoeLayer)}
    lengths = {"inputs": 512, "targets": 512}
    run: dict[str, Any] = {"BATCH_SIZE": 8, "TRAIN_STEPS": 1, "TASK_FEATURE_LENGTHS": lengths}
    # What a file of routing may read of the model's sizes.
    run["EXPERT_MLP_DIM"] = mlp
    files = ["gin/models/tiny.gin", f"gin/moe/{name}.gin", "gin/sharding/expert_parallel.gin"]
    files += ["gin/tasks/random.gin", "gin/runs/pretrain.gin"]
    read = read_files(name, files, [f"{macro}={value!r}" for macro, value in run.items()])
    source = fiddle_config(read.assembled).model
    _take_routing(read.assembled, "model", source, model)
    for stack in ("encoder", "decoder"):
        layer = getattr(source.module, stack).pattern[1].ffn  # tiny.gin: (dense, sparse)
        for target in selectors.select(getattr(model.module, stack), MoeLayer):
            place = f"model.module.{stack}.pattern[1].ffn"
            _take_routing(read.assembled, place, layer, target)


def _take_routing(
    assembled: Assembled[Any], path: str, source: fdl.Config, target: fdl.Config
) -> None:
    """Copy the arguments that a file of gin/moe sets, by itself or through a macro."""
    for name, value in fdl.ordered_arguments(source).items():
        where = assembled.where(f"{path}.{name}")
        sites = [site for site in (where.site, where.read_at) if site]
        if any(site.file.startswith("gin/moe/") for site in sites):
            location = source.__argument_history__[name][-1].location
            with history.custom_location(lambda found=location: found):
                setattr(target, str(name), copy.deepcopy(value))


def m4_task(
    sizes: Sizes,
    *,
    batch_size: int,
    lengths: dict[str, int],
    more: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Return data and evaluators of the default corpus, as gin/tasks/m4.gin has them.

    The tasks are one config in all places: `--fdl_set=data.tasks.temperature=1.5` changes all.

    Args:
        sizes: of the model, for its vocabularies.
        batch_size: rows, of evaluation.
        lengths: tokens in a row, of evaluation.
        more: take gin/tasks/m4_more.gin.
        **settings: macros of that file: `LANGUAGES=["de"]`, `TEMPERATURE=1.5`, `EVAL_PERIOD=100`.
    """
    source, target = sizes.vocabularies
    config = of_gin(
        "gin/models/tiny.gin",
        "gin/moe/gshard.gin",
        "gin/sharding/expert_parallel.gin",
        "gin/tasks/m4_more.gin" if more else "gin/tasks/m4.gin",
        "gin/runs/pretrain.gin",
        SOURCE_VOCAB_SIZE=source,
        TARGET_VOCAB_SIZE=target,
        BATCH_SIZE=batch_size,
        TASK_FEATURE_LENGTHS=lengths,
        TRAIN_STEPS=1,
        **settings,
    )
    # gin builds them anew wherever they are read.
    for evaluator in config.evaluators:
        if "tasks" in fdl.ordered_arguments(evaluator):
            evaluator.tasks = config.data.tasks
    return {"data": config.data, "evaluators": config.evaluators}


def random_task(sizes: Sizes) -> dict[str, Any]:
    """Return random tokens as data, and no evaluators; as gin/tasks/random.gin."""
    source, target = sizes.vocabularies
    data = fdl.Config(RandomData, source_vocab_size=source, target_vocab_size=target)
    return {"data": data, "evaluators": ()}


def experiment(
    model: fdl.Config,
    task: dict[str, Any],
    *,
    batch_size: int,
    lengths: dict[str, int],
    mesh: tuple[int, int, int] = (1, 1, 1),
    **settings: Any,
) -> fdl.Config[Experiment]:
    """Return the whole: the paper's optimizer and sharding; as gin/runs/pretrain.gin.

    Args:
        model: of `dense_model` or `moe_model`.
        task: of `m4_task` or `random_task`.
        batch_size: rows, over all devices.
        lengths: tokens in a row, by side.
        mesh: sizes of data, expert and model.
        **settings: further arguments of `Experiment`; `model_dir` may be left to a flag.
    """
    table = tuple((name, _SPLIT.get(name)) for name in axes.LOGICAL_AXES)
    data, expert, parts = mesh
    defaults = {
        "optimizer": fdl.Config(Adafactor, learning_rate=fdl.Config(SqrtDecay)),
        "checkpoints": fdl.Config(Checkpoints, every_steps=1000, keep=3),
        "microbatches": 1,
        "seed": 0,
        "log_every_steps": 100,
        "search": fdl.Config(FlatBeamSearch, beam_size=4, alpha=0.8, max_length=None),
    }
    return fdl.Config(
        Experiment,
        model=model,
        lengths=lengths,
        batch_size=batch_size,
        rules=fdl.Config(Rules, table=table),
        mesh=fdl.Config(MeshSpec, data=data, expert=expert, model=parts),
        nonfinite=fdl.Config(NonFinite, max_skipped=0),
        **task,
        **defaults | settings,
    )


def _model(sizes: Sizes, encoder: fdl.Config, decoder: fdl.Config, dtype: str) -> fdl.Config:
    source, target = (
        fdl.Config(Embedding, vocab_size=n, embed_dim=sizes.width) for n in sizes.vocabularies
    )
    module = fdl.Config(
        Transformer,
        source_embedding=source,
        target_embedding=target,
        encoder=encoder,
        decoder=decoder,
        dropout_rate=0.1,
        dtype=dtype,
    )
    return fdl.Config(Seq2SeqModel, module=module, label_smoothing=0.1, z_loss=0.0)


def _stack(sizes: Sizes, pattern: Sequence[fdl.Config], remat: str) -> fdl.Config:
    return fdl.Config(Stack, num_layers=sizes.layers, pattern=tuple(pattern), remat=remat, unroll=1)


def _attention(sizes: Sizes) -> fdl.Config:
    return fdl.Config(
        MultiHeadAttention, num_heads=sizes.heads, head_dim=sizes.head_dim, dropout_rate=0.1
    )


# Each layer is a config of its own, as flax would tie the parameters of one that stands twice.
def _encoder_block(sizes: Sizes, ffn: fdl.Config) -> fdl.Config:
    return fdl.Config(
        EncoderBlock,
        attention=_attention(sizes),
        ffn=fdl.deepcopy_with(ffn),
        dropout_rate=0.1,
    )


def _decoder_block(sizes: Sizes, ffn: fdl.Config) -> fdl.Config:
    return fdl.Config(
        DecoderBlock,
        attention=_attention(sizes),
        cross_attention=_attention(sizes),
        ffn=fdl.deepcopy_with(ffn),
        dropout_rate=0.1,
    )

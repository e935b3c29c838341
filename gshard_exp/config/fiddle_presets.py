"""The shipped experiments as fiddle builders, each named after its gin file.

    gshard-exp train --fdl_config=moe_128e_12l --fdl_set=model_dir=runs/paper
    gshard-exp train --fdl_config="small(batch_size=64, train_steps=10000, routing='switch',
        lengths={'inputs': 64, 'targets': 64})" --fdl_set=model_dir=runs/small

A builder of one's own calls one of these, or `fiddle_parts`, and changes what it returns. What the
settings come from stands in the gin files; a test holds the two to the same trees.
"""

from typing import Any

import fiddle as fdl

from gshard_exp.config import fiddle_parts as parts
from gshard_exp.moe.dispatch import ScatterDispatch

Lengths = dict[str, int]
_PAPER_LENGTHS = {"inputs": 256, "targets": 256}


def moe_128e_12l() -> fdl.Config:
    """MoE(128E,12L) of the paper."""
    return _paper_moe(experts=128, layers=12)


def moe_128e_36l() -> fdl.Config:
    """MoE(128E,36L) of the paper."""
    return _paper_moe(experts=128, layers=36)


def moe_512e_12l() -> fdl.Config:
    """MoE(512E,12L) of the paper."""
    return _paper_moe(experts=512, layers=12)


def moe_512e_36l() -> fdl.Config:
    """MoE(512E,36L) of the paper."""
    return _paper_moe(experts=512, layers=36)


def moe_2048e_12l() -> fdl.Config:
    """MoE(2048E,12L) of the paper."""
    return _paper_moe(experts=2048, layers=12, batch_size=16384, train_steps=238419)


def moe_2048e_36l() -> fdl.Config:
    """MoE(2048E,36L) of the paper."""
    return _paper_moe(experts=2048, layers=36, batch_size=16384, train_steps=238419)


def moe_2048e_60l() -> fdl.Config:
    """MoE(2048E,60L) of the paper, the one in bfloat16."""
    return _paper_moe(
        experts=2048,
        layers=60,
        batch_size=16384,
        train_steps=238419,
        dtype="bfloat16",
        gradient_dtype="bfloat16",
    )


def dense_96l() -> fdl.Config:
    """T(96L), the paper's dense baseline."""
    sizes = parts.Sizes(layers=48, width=1024, mlp=8192, heads=16, head_dim=64)
    model = parts.dense_model(sizes, remat="full")
    return _on_m4(model, sizes, 16384, _PAPER_LENGTHS, train_steps=300000, mesh=(256, 1, 8))


def bilingual_big(language: str = "de") -> fdl.Config:
    """The bilingual baseline of high-resource languages, of one language into English."""
    sizes = parts.Sizes(layers=6, width=1024, mlp=8192, heads=16, head_dim=64)
    return _bilingual(sizes, language)


def bilingual_base(language: str = "sw") -> fdl.Config:
    """The bilingual baseline of low-resource languages, of one language into English."""
    sizes = parts.Sizes(layers=6, width=512, mlp=2048, heads=8, head_dim=64)
    return _bilingual(sizes, language)


def quickstart() -> fdl.Config:
    """The quickstart's small sparse model; experiments/quickstart/README.md."""
    lengths = {"inputs": 64, "targets": 32}
    config = tiny(
        batch_size=32,
        train_steps=1200,
        lengths=lengths,
        task={
            "more": True,
            "TEMPERATURE": 1.5,
            "EVAL_PERIOD": 1200,
            "EVAL_EXAMPLES": 30,
            "TRANSLATION_EXAMPLES": 20,
        },
        group_size=256,
    )
    config.model_dir = "runs/quickstart"
    config.log_every_steps = 50
    config.checkpoints.every_steps = 400
    config.optimizer.learning_rate.constant_steps = 500
    return config


def tiny(*, batch_size: int, lengths: Lengths, train_steps: int, **more: Any) -> fdl.Config:
    """2 + 2 layers of width 128, 8 experts; arguments: see `base`."""
    sizes = parts.Sizes(
        layers=2, width=128, mlp=512, heads=4, head_dim=32, vocabularies=(8000, 4000)
    )
    run: dict[str, Any] = {"batch_size": batch_size, "lengths": lengths, "train_steps": train_steps}
    return _sized(sizes, **{"experts": 8, "group_size": 512} | run | more)


def small(*, batch_size: int, lengths: Lengths, train_steps: int, **more: Any) -> fdl.Config:
    """4 + 4 layers of width 256, 16 experts; arguments: see `base`."""
    sizes = parts.Sizes(
        layers=4, width=256, mlp=1024, heads=4, head_dim=64, vocabularies=(16000, 8000)
    )
    run: dict[str, Any] = {"batch_size": batch_size, "lengths": lengths, "train_steps": train_steps}
    return _sized(sizes, **{"experts": 16, "group_size": 1024} | run | more)


def base(*, batch_size: int, lengths: Lengths, train_steps: int, **more: Any) -> fdl.Config:
    """6 + 6 layers of width 512, 32 experts.

    Args:
        batch_size: rows, over all devices.
        lengths: tokens in a row, {"inputs": ..., "targets": ...}.
        train_steps: the step at which the run ends.
        **more: `routing` (name of a file in gin/moe), `task` ("random", or a dict of arguments of
            `fiddle_parts.m4_task`), `experts`, `group_size`, and arguments of `Experiment`.
    """
    sizes = parts.Sizes(
        layers=6, width=512, mlp=2048, heads=8, head_dim=64, vocabularies=(32000, 16000)
    )
    run: dict[str, Any] = {"batch_size": batch_size, "lengths": lengths, "train_steps": train_steps}
    return _sized(sizes, **{"experts": 32, "group_size": 1024} | run | more)


def _sized(
    sizes: parts.Sizes,
    *,
    batch_size: int,
    lengths: Lengths,
    train_steps: int,
    experts: int,
    group_size: int,
    routing: str = "gshard",
    task: Any = None,
    **settings: Any,
) -> fdl.Config:
    model = parts.moe_model(
        sizes, experts=experts, group_size=group_size, routing=routing, dispatch=ScatterDispatch
    )
    if task == "random":
        made = parts.random_task(sizes)
    else:
        made = parts.m4_task(sizes, batch_size=batch_size, lengths=lengths, **task or {})
    settings["train_steps"] = train_steps
    return parts.experiment(model, made, batch_size=batch_size, lengths=lengths, **settings)


def _paper_moe(
    *,
    experts: int,
    layers: int,
    batch_size: int = 4096,
    train_steps: int = 953674,
    dtype: str = "float32",
    gradient_dtype: str = "float32",
) -> fdl.Config:
    """One of Tables 1 and 3: all recomputed from 36 layers on, as many devices as experts."""
    sizes = parts.Sizes(layers=layers // 2, width=1024, mlp=8192, heads=16, head_dim=128)
    model = parts.moe_model(
        sizes,
        experts=experts,
        group_size=2048,
        remat="full" if layers >= 36 else "products",
        dtype=dtype,
    )
    return _on_m4(
        model,
        sizes,
        batch_size,
        _PAPER_LENGTHS,
        train_steps=train_steps,
        mesh=(1, experts, 1),
        gradient_dtype=gradient_dtype,
    )


def _bilingual(sizes: parts.Sizes, language: str) -> fdl.Config:
    model = parts.dense_model(sizes)
    task = {"LANGUAGES": [language]}
    return _on_m4(model, sizes, 256, _PAPER_LENGTHS, task, train_steps=100000)


def _on_m4(
    model: fdl.Config,
    sizes: parts.Sizes,
    batch_size: int,
    lengths: Lengths,
    task: dict[str, Any] | None = None,
    **settings: Any,
) -> fdl.Config:
    made = parts.m4_task(sizes, batch_size=batch_size, lengths=lengths, **task or {})
    return parts.experiment(model, made, batch_size=batch_size, lengths=lengths, **settings)

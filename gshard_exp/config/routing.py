"""Finds the routing presets of gin/moe/ and audits them against Algorithm 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gshard_exp.config.assemble import assemble
from gshard_exp.config.errors import ConfigError, nearest, one_of
from gshard_exp.config.search import shipped_root

# What makes an experiment of a preset; its sizes do not matter here.
_AROUND = (
    ("gin/models/tiny.gin",),
    ("gin/sharding/expert_parallel.gin", "gin/tasks/random.gin", "gin/runs/pretrain.gin"),
)
_ANY = (
    "MODEL_DIR='unused'",
    "TRAIN_STEPS=1",
    "BATCH_SIZE=8",
    "TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}",
)
GROUPS, GROUP_SIZE, EXPERTS = 4, 128, 16


def preset_names() -> list[str]:
    """List the presets that are shipped; the paper's first."""
    names = sorted(path.stem for path in (shipped_root() / "gin/moe").glob("*.gin"))
    return sorted(names, key=lambda name: name != "gshard")


def audit_presets(
    names: Sequence[str] = (), bindings: Sequence[str] = (), search_paths: Sequence[str] = ()
) -> dict[str, Any]:
    """Route the batches of `moe.audit.audit_batches` by each preset, as in training.

    Args:
        names: presets, or gin files of one's own that provide what a preset does; none is all.
        bindings: `NAME=VALUE`; these win over files.
        search_paths: folders in which gin files are looked for.

    Returns:
        Sizes of a batch, and under `rows` the fields of each `moe.audit.AuditRow`.

    Raises:
        ConfigError: there is no such preset, or a mistake in a file.
    """
    from gshard_exp.moe.audit import audit, audit_batches

    gatings: dict[str, Any] = {}
    for name in names or preset_names():
        gatings |= dict(_gatings(name, bindings, search_paths))
    batches = audit_batches(0, GROUPS, GROUP_SIZE, EXPERTS)
    rows = [dataclasses.asdict(row) for row in audit(gatings, batches)]
    sizes = {"groups": GROUPS, "group_size": GROUP_SIZE, "num_experts": EXPERTS}
    return sizes | {"rows": rows}


def table(report: Mapping[str, Any]) -> str:
    """Write a table for each batch."""
    rows = report["rows"]
    width = max(len(row["gating"]) for row in rows)
    tokens = report["groups"] * report["group_size"]
    lines = [
        f"Of {tokens} tokens in groups of {report['group_size']} on {report['num_experts']} "
        "experts, against Algorithm 1:",
        "routed: held by other experts (gained one, lost one); overflow: an expert had no slot;",
        "left: held by none; weighed: same experts, other weights; aux: auxiliary loss, 1 if even.",
    ]
    for batch in dict.fromkeys(row["batch"] for row in rows):
        heading = f"{batch:{width}}    C routed gained   lost overflow   left weighed    aux"
        lines += ["", heading]
        lines += [_line(row, width) for row in rows if row["batch"] == batch]
    return "\n".join(lines)


def _line(row: Mapping[str, Any], width: int) -> str:
    capacity = "-" if row["capacity"] is None else row["capacity"]
    return (
        f"{row['gating']:{width}} {capacity:>4} {row['routed_differently']:6} {row['gained']:6} "
        f"{row['lost']:6} {row['overflowed']:8} {row['left_behind']:6} "
        f"{row['weighed_differently']:7} {row['auxiliary_loss']:6.3f}"
    )


def _gatings(
    name: str, bindings: Sequence[str], search_paths: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Yield what a preset routes by; encoder and decoder apart where they differ."""
    from gshard_exp.model.contract import moe_layers
    from gshard_exp.moe.audit import Audited
    from gshard_exp.train.experiment import Experiment

    before, after = _AROUND
    files = (*before, _file_of(name), *after)
    model = assemble(Experiment, files, (*_ANY, *bindings), search_paths).tree.model
    found = {}
    for stack in ("encoder", "decoder"):
        for _, layer in moe_layers(model, stack):
            found[stack] = Audited(layer.gating, layer.train_capacity_factor)
    same = len(set(found.values())) == 1
    for stack, audited in found.items():
        if not same:
            yield f"{name}, {stack}", audited
        elif stack == "encoder":
            yield name, audited


def _file_of(name: str) -> str:
    if name.endswith(".gin"):
        return name
    known = preset_names()
    if name not in known:
        raise ConfigError(
            f"There is no routing preset '{name}'.",
            rule=f"A preset is one of {', '.join(known)}, or a gin file.",
            at=[f"command line: --preset={name}"],
            hint=one_of([f"--preset={near}" for near in nearest(name, known)]),
        )
    return f"gin/moe/{name}.gin"

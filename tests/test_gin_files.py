"""Every gin file that we ship is found, assembled, shrunk and stepped once."""

import dataclasses
import functools
import importlib.util
import math

import jax
import numpy as np
import pytest

from gin import config_parser
from gshard_exp.config import assemble, find_gin_files, parse, shipped_root
from gshard_exp.model.contract import abstract_batch
from gshard_exp.sweep.prepare import prepare, read_sweep
from gshard_exp.train.experiment import Experiment, check_layout, check_without_devices
from gshard_exp.train.state import plan_state
from gshard_exp.train.step import partitioned_train_step

SHIPPED = [str(path.relative_to(shipped_root())) for path in find_gin_files()]
T5X = "gin/t5x/"  # read by t5x and gin-config, and no experiments of ours
SWEEPS = [name for name in SHIPPED if "/sweeps/" in name]  # grids of experiments
FILES = [name for name in SHIPPED if not name.startswith(T5X) and name not in SWEEPS]
THIS = "this file"
MODEL = ("gin/models/tiny.gin", "gin/moe/gshard.gin")
SHARDING = "gin/sharding/expert_parallel.gin"
TASK = "gin/tasks/random.gin"
RUN = "gin/runs/pretrain.gin"
EIGHT = ("DATA_PARTITIONS=2", "NUM_EXPERT_PARTITIONS=2", "NUM_MODEL_PARTITIONS=2")


@dataclasses.dataclass(frozen=True)
class Rule:
    """The files that make an experiment of those below a path, in order, and flags.

    `unread` are macros that files in front mention and nothing reads any more.
    """

    files: tuple[str, ...]
    flags: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


# The longest path that a file's name starts with counts.
RULES = {
    "gin/models/": Rule((THIS, "gin/moe/gshard.gin", SHARDING, TASK, RUN)),
    "gin/models/transformer.gin": Rule((THIS, SHARDING, TASK, RUN)),
    "gin/models/moe_transformer.gin": Rule(
        (THIS, "gin/moe/gshard.gin", SHARDING, TASK, RUN), ("NUM_EXPERT_PARTITIONS=2",)
    ),
    "gin/moe/": Rule((MODEL[0], THIS, SHARDING, TASK, RUN)),
    "gin/sharding/": Rule((*MODEL, THIS, TASK, RUN), EIGHT),
    "gin/tasks/": Rule((*MODEL, SHARDING, THIS, RUN)),
    "gin/tasks/tsv.gin": Rule(
        (*MODEL, SHARDING, "gin/tasks/m4.gin", THIS, RUN), ("TSV_PATH=pairs.tsv",)
    ),
    "gin/runs/": Rule((*MODEL, SHARDING, TASK, THIS)),
    "gin/paper/": Rule((THIS,)),
    "experiments/": Rule((THIS,)),
    "experiments/mini_m4/": Rule((THIS,), ("TRAIN_STEPS=200",)),
    "experiments/mini_m4/parts/": Rule(
        ("experiments/mini_m4/mini_m4.gin", THIS),
        ("TRAIN_STEPS=200",),
        unread=("NUM_EXPERTS", "EXPERT_MLP_DIM", "GROUP_SIZE"),
    ),
    "experiments/vision_moe/": Rule((THIS,), ("TASK_FEATURE_LENGTHS={}", "TRAIN_STEPS=100")),
}
# What is read of these is set to these; the rest stays as the files say.
SHRUNK = {
    "MODEL_DIR": "unused",
    "TRAIN_STEPS": 1,
    "BATCH_SIZE": 8,
    "TASK_FEATURE_LENGTHS": {"inputs": 8, "targets": 8},
    "NUM_ENCODER_LAYERS": 2,
    "NUM_DECODER_LAYERS": 2,
    "EMBED_DIM": 16,
    "MLP_DIM": 32,
    "EXPERT_MLP_DIM": 32,
    "NUM_HEADS": 2,
    "HEAD_DIM": 8,
    "NUM_EXPERTS": 4,
    "GROUP_SIZE": 16,
    "SOURCE_VOCAB_SIZE": 40,
    "TARGET_VOCAB_SIZE": 40,
}
LARGEST_AXIS = 2  # of the mesh
pytestmark = pytest.mark.usefixtures("quick_compilation")  # each program takes one step
OF_THE_RUN = ("MODEL_DIR", "TRAIN_STEPS", "BATCH_SIZE", "TASK_FEATURE_LENGTHS")


class Unresolved(config_parser.ParserDelegate):
    """Leaves what a file mentions as it is written."""

    def configurable_reference(self, scoped_configurable_name, evaluate):
        return scoped_configurable_name

    def macro(self, macro_name):
        return macro_name


def rule_of(name):
    """Return the rule for a file."""
    covering = [path for path in RULES if name.startswith(path)]
    if not covering:
        pytest.fail(f"no rule of RULES says what makes an experiment of {name}: add one")
    return RULES[max(covering, key=len)]


def files_of(name):
    """List the files that make an experiment, this one among them."""
    return [name if file is THIS else file for file in rule_of(name).files]


def shrunk(name):
    """Assemble the experiment of a file at a size for tests."""
    rule, files = rule_of(name), files_of(name)
    read = parse(Experiment, files, rule.flags).macros_mentioned() - set(rule.unread)
    flags = [f"{macro}={value!r}" for macro, value in SHRUNK.items() if macro in read]
    tree = assemble(Experiment, files, [*flags, *rule.flags]).tree
    sizes = dataclasses.asdict(tree.mesh)
    mesh = type(tree.mesh)(**{axis: min(size, LARGEST_AXIS) for axis, size in sizes.items()})
    return dataclasses.replace(tree, mesh=mesh)


@functools.cache
def loss_of_a_step(model, optimizer, rules, mesh_spec, microbatches, lengths):
    """Take one step; files that shrink to the same experiment share it."""
    mesh = mesh_spec.build()
    plan = plan_state(model, optimizer, mesh, rules)
    rng = np.random.default_rng(0)
    # Initialising would be compiled too, for nothing.
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), plan.abstract)
    params = jax.tree.map(lambda z: rng.normal(size=z.shape).astype(z.dtype), zeros.params)
    state = jax.device_put(zeros.replace(params=params), plan.shardings)
    entries = model.batch_entries(SHRUNK["BATCH_SIZE"], dict(lengths))
    batch = {}
    for key, x in abstract_batch(entries, mesh, rules).items():
        # Integers are tokens, segments, positions, weights or classes: 1 and 2 are any of these.
        integers = x.dtype == np.int32
        value = rng.integers(1, 3, x.shape) if integers else rng.normal(size=x.shape)
        batch[key] = jax.device_put(value.astype(x.dtype), x.sharding)
    step = partitioned_train_step(plan, rules, microbatches)
    state, metrics = step(state, batch)
    assert int(state.step) == 1
    return float(metrics["loss"])


@pytest.mark.parametrize("name", FILES)
def test_it_makes_an_experiment_that_steps(name):
    tree = shrunk(name)
    check_layout(tree, tree.mesh.build())
    loss = loss_of_a_step(
        tree.model,
        tree.optimizer,
        tree.rules,
        tree.mesh,
        tree.microbatches,
        tuple(tree.lengths.items()),
    )
    assert math.isfinite(loss)


@pytest.mark.parametrize("name", FILES)
def test_check_finds_it_valid_at_its_own_size(name):
    mentioned = parse(Experiment, files_of(name), rule_of(name).flags).macros_mentioned()
    if name.startswith(("gin/paper/", "experiments/")):
        chosen = {"MODEL_DIR": "unused"}  # the rest they say themselves
    elif name.endswith("transformer.gin"):
        chosen = SHRUNK  # the skeletons have no sizes
    else:
        # A batch that lies evenly on any of their meshes.
        chosen = SHRUNK | {"BATCH_SIZE": 64, "TASK_FEATURE_LENGTHS": {"inputs": 64, "targets": 64}}
        chosen = {macro: chosen[macro] for macro in OF_THE_RUN}
    flags = [f"{macro}={value!r}" for macro, value in chosen.items() if macro in mentioned]
    tree = assemble(Experiment, files_of(name), [*flags, *rule_of(name).flags]).tree
    check_without_devices(tree)


@pytest.mark.parametrize("name", SWEEPS)
def test_every_point_of_a_sweep_is_valid(name):
    file = read_sweep(name, search_paths=[str(shipped_root())])
    points = prepare(file)
    assert len(points) == len(file.points) > 1


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith(T5X)])
def test_a_file_for_t5x_is_gin_and_names_what_there_is(name):
    """`test_t5x_runner.py` trains with it where t5x is."""
    with (shipped_root() / name).open() as file:
        found = list(config_parser.ConfigParser(file, Unresolved()))
    modules = [s.module for s in found if isinstance(s, config_parser.ImportStatement)]
    ours = [module for module in modules if module.startswith("gshard_exp.")]
    assert ours and all(importlib.util.find_spec(module) for module in ours)
    includes = [s.filename for s in found if isinstance(s, config_parser.IncludeStatement)]
    assert {file for file in includes if not file.startswith("t5x/")} <= set(SHIPPED)
    assert any(isinstance(s, config_parser.BindingStatement) for s in found)


@pytest.mark.parametrize("name", SHIPPED)
def test_it_opens_with_what_it_is(name):
    first = (shipped_root() / name).read_text().splitlines()[0]
    assert first.startswith("# ") and len(first) > 20


def test_every_rule_covers_a_file():
    unused = [path for path in RULES if not any(name.startswith(path) for name in FILES)]
    assert not unused


def test_files_are_found_in_every_folder_of_the_plan():
    folders = {name.rsplit("/", 1)[0] for name in FILES}
    assert folders >= {f"gin/{f}" for f in ("models", "moe", "sharding", "tasks", "runs", "paper")}
    assert "experiments/quickstart" in folders


def test_a_file_that_no_rule_covers_fails():
    with pytest.raises(pytest.fail.Exception, match="add one"):
        rule_of("gin/new/file.gin")

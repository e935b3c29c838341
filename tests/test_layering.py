"""The house plan, read from the source: floors, who may import what, and sizes of files."""

import ast
from pathlib import Path

import pytest

import gin
from gshard_exp import axes

REPO = Path(__file__).parent.parent
PACKAGE = REPO / "gshard_exp"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")

# A room imports only rooms on lower floors (and itself).
FLOORS = {
    "axes": 1,
    "compile_cache": 1,
    "errors": 1,
    "paths": 1,
    "recompute": 1,
    "rng": 1,
    "sharding": 2,
    "moe": 3,
    "data": 3,
    "model": 4,
    "train": 5,
    "score": 5,
    "use": 8,
    "plan": 6,
    "config": 7,
    "sweep": 8,
    "t5x_runner": 8,
    "look": 8,  # verbs of the command line
    "reports": 9,  # verbs of the command line
    "verify": 9,  # verbs of the command line
    "sweep_verbs": 9,  # verbs of the command line
    "planning": 9,  # a verb of the command line
    "cli": 10,
    "__main__": 11,  # hands over to cli
}
LONGEST_FILE = 400  # lines
LONGEST_FUNCTION = 60
FORBIDDEN_STEMS = ("utils", "common", "helpers")
ONLY_CONFIG = {"gin", "fiddle", "absl"}
FORBIDDEN_AT_TOP = {
    "tensorflow",
    "seqio",
    "sentencepiece",
    "tensorflow_datasets",
    "sacrebleu",
    "matplotlib",
}
# Model code places values by the logical names of dimensions; which mesh axes these lie on is said
# by the rules.
MODEL_CODE = [path for path in MODULES if path.parent.name in ("model", "moe")]
PLACES_BY_NAME = {
    "gshard_exp.sharding.annotate.constrain",
    "gshard_exp.sharding.manual.manual",
    "gshard_exp.sharding.manual.sum_over_devices",
    "gshard_exp.sharding.rules.Names",
    "gshard_exp.sharding.rules.Rules",
}
PLACES_BY_HAND = {
    "NamedSharding",
    "PartitionSpec",
    "shard_map",
    "with_sharding_constraint",
    "DATA",
    "EXPERT_AXIS",
    "MODEL",
    "MESH_AXES",
}


def names(modules):
    return [str(path.relative_to(REPO)) for path in modules]


def room(path):
    """Return the room of a module: its folder, or itself if it lies in the package's root."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree):
    """Yield the dotted names that a module imports, anywhere in it; relative ones as they are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_rooms(source):
    parts = [name.split(".") for name in imports(ast.parse(source))]
    return {part[1] for part in parts if part[0] == "gshard_exp" and len(part) > 1}


def functions_longer_than(limit, source):
    """Name the functions with more lines than that, docstrings left out."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds):
            told = node.body[0] if ast.get_docstring(node) else None
            docstring = told.end_lineno - told.lineno + 1 if told else 0
            lines = node.end_lineno - node.lineno + 1 - docstring
            if lines > limit:
                found.append(f"{node.name}: {lines} lines")
    return found


@pytest.mark.parametrize("path", MODULES, ids=names(MODULES))
def test_a_room_imports_only_rooms_on_lower_floors(path):
    here = room(path)
    assert here in FLOORS, f"give {here} a floor"
    above = {
        other
        for other in imported_rooms(path.read_text())
        if other in FLOORS and other != here and FLOORS[other] >= FLOORS[here]
    }
    assert not above, f"{here} (floor {FLOORS[here]}) imports {sorted(above)}"


def test_every_import_of_ours_names_a_room_or_a_shipped_folder():
    known = {*FLOORS, "tasks", "__version__"}
    found = {name for path in MODULES for name in imported_rooms(path.read_text())}
    assert found <= known


def test_an_import_of_a_higher_floor_would_be_seen():
    source = "def late():\n    from gshard_exp.train import loop\n"
    assert imported_rooms(source) == {"train"}
    assert imported_rooms("import gshard_exp.config.parse") == {"config"}


def test_no_import_is_relative():
    relative = [
        str(path.relative_to(REPO))
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith(".") for name in imports(ast.parse(path.read_text())))
    ]
    assert not relative


def test_only_config_imports_gin_fiddle_and_absl():
    owners = {
        room(path)
        for path in MODULES
        if ONLY_CONFIG & {name.split(".")[0] for name in imports(ast.parse(path.read_text()))}
    }
    assert owners <= {"config"}


def test_environment_variables_are_read_by_the_command_line_alone():
    """`data/tensorflow_import.py` and `plan/topology.py` write some, for libraries they load."""
    allowed = {"cli.py", "tensorflow_import.py", "topology.py"}
    readers = {path.name for path in MODULES if "os.environ" in path.read_text()}
    assert readers <= allowed
    assert not [path for path in MODULES if "getenv" in path.read_text()]


def test_only_the_mesh_asks_jax_for_devices():
    asks = ("jax.devices(", "jax.local_devices(", "jax.device_count(", "jax.local_device_count(")
    askers = [
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if any(call in path.read_text() for call in asks)
    ]
    assert askers == ["sharding/mesh.py"]


def by_hand(source):
    """Name what a source uses of the mesh itself, past the logical names of dimensions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            mentioned = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            mentioned = {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            mentioned = {ast.unparse(node)}
        else:
            mentioned = {node.value} if isinstance(node, ast.Constant) else set()
            found |= mentioned & set(axes.MESH_AXES)
            continue
        found |= {name for name in mentioned if name.split(".")[-1] in PLACES_BY_HAND}
        found |= {n for n in mentioned if n.startswith("gshard_exp.sharding")} - PLACES_BY_NAME
    return found


@pytest.mark.parametrize("path", MODEL_CODE, ids=names(MODEL_CODE))
def test_model_code_places_values_by_logical_names_alone(path):
    assert not by_hand(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "from jax.sharding import PartitionSpec as P",
        "jax.sharding.NamedSharding(mesh, spec)",
        "jax.lax.with_sharding_constraint(x, spec)",
        "from gshard_exp.sharding.annotate import constrain, split",
        "from gshard_exp.sharding import annotate",
        "import gshard_exp.sharding.annotate",
        "psum(x, 'model')",
        "psum(x, axes.EXPERT_AXIS)",
        "from gshard_exp.axes import DATA",
    ],
)
def test_a_value_that_is_placed_by_hand_would_be_seen(source):
    assert len(by_hand(source)) == 1


def test_argv_is_read_by_the_command_line_alone():
    readers = [path.name for path in MODULES if "sys.argv" in path.read_text()]
    assert readers == ["cli.py"]


def test_data_libraries_are_imported_within_functions_or_in_modules_that_need_them():
    """`data/token_source.py` derives a class of seqio's and is imported within a function."""
    eager = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and FORBIDDEN_AT_TOP & {name.split(".")[0] for name in imports(node)}
    }
    assert eager <= {"data/token_source.py"}


@pytest.mark.parametrize("path", MODULES, ids=names(MODULES))
def test_a_file_is_not_too_long(path):
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST_FILE, f"{path.relative_to(REPO)} has {lines} lines"


@pytest.mark.parametrize("path", MODULES, ids=names(MODULES))
def test_no_function_is_too_long(path):
    assert not functions_longer_than(LONGEST_FUNCTION, path.read_text())


def test_a_function_that_is_too_long_would_be_seen():
    source = 'def long():\n    """Say.\n\n    More.\n    """\n' + "    pass\n" * 60
    assert functions_longer_than(60, source) == ["long: 61 lines"]


def test_no_file_is_a_drawer_for_everything():
    files = [path for path in REPO.rglob("*.py") if not _hidden(path)]
    drawers = [
        path.name for path in files if path.stem in FORBIDDEN_STEMS or path.stem.startswith("base_")
    ]
    assert not drawers


def test_our_gin_folder_does_not_hide_the_gin_package():
    assert not list((REPO / "gin").rglob("*.py"))
    assert REPO not in Path(gin.__file__).resolve().parents or ".venv" in gin.__file__


def _hidden(path):
    return any(part.startswith(".") or part == "build" for part in path.relative_to(REPO).parts)

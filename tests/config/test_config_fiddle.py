"""fiddle as a second front end: the same trees as gin, set by flags, and turned into each other."""

import ast
import re
import sys
from pathlib import Path

import fiddle as fdl
import pytest

from gshard_exp.config import ConfigError, assemble, operative_config, shipped_root
from gshard_exp.config.from_fiddle import assemble_fiddle, load, presets
from gshard_exp.config.reading import read_subject
from gshard_exp.config.show import written_as
from gshard_exp.config.validate import complete_experiments
from gshard_exp.train.experiment import Experiment

COMPLETE = complete_experiments()
ROUTINGS = sorted(path.stem for path in (shipped_root() / "gin/moe").glob("*.gin"))
RUN = ("gin/sharding/expert_parallel.gin", "gin/tasks/random.gin", "gin/runs/pretrain.gin")
HERE = ["model_dir=x"]
LENGTHS = {"inputs": 64, "targets": 64}
SIZED = f"(batch_size=64, train_steps=5, lengths={LENGTHS}"
GIN_SIZED = (
    "MODEL_DIR=x",
    "BATCH_SIZE=64",
    "TRAIN_STEPS=5",
    f"TASK_FEATURE_LENGTHS={LENGTHS}",
)


def expression_of(gin_file):
    """Return what `--fdl_config` takes for a gin file: its builder, or else the file itself."""
    stem = Path(gin_file).stem
    return stem if stem in presets() else gin_file


def tree_of(expression, *assignments):
    return assemble_fiddle(Experiment, expression, [*HERE, *assignments]).tree


def built(code):
    """Run Python code, call its function `config`, and let fiddle build what that returns."""
    namespace = {}
    exec(compile(code, "code", "exec"), namespace)
    return fdl.build(namespace["config"]())


@pytest.fixture(autouse=True)
def forget_builders(tmp_path):
    """Let the next test write a module of the same name."""
    yield
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


# The same trees.


@pytest.mark.parametrize("name", COMPLETE)
def test_gin_and_fiddle_assemble_the_same_tree(name):
    assert tree_of(expression_of(name)) == assemble(Experiment, [name], ["MODEL_DIR=x"]).tree


@pytest.mark.parametrize("name", COMPLETE)
def test_fiddle_itself_builds_the_same_tree(name):
    """The oracle is `fdl.build`, which knows nothing of ours."""
    config = load(expression_of(name))
    config.model_dir = "x"
    assert fdl.build(config) == tree_of(expression_of(name))


def test_every_model_of_the_paper_and_every_size_has_a_builder():
    named = {Path(name).stem for name in COMPLETE if name.startswith("gin/paper/")}
    skeletons = {"transformer", "moe_transformer"}
    sizes = {path.stem for path in (shipped_root() / "gin/models").glob("*.gin")} - skeletons
    assert named | sizes | {"quickstart"} <= set(presets())


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
@pytest.mark.parametrize("task", ["m4", "random"])
def test_the_sizes_are_those_of_gin(size, task):
    files = (f"gin/models/{size}.gin", "gin/moe/gshard.gin", *RUN, f"gin/tasks/{task}.gin")
    argument = ", task='random')" if task == "random" else ")"
    assert tree_of(size + SIZED + argument) == assemble(Experiment, files, GIN_SIZED).tree


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_routings_are_those_of_gin(routing):
    files = ("gin/models/small.gin", f"gin/moe/{routing}.gin", *RUN)
    tree = tree_of(f"small{SIZED}, task='random', routing='{routing}')")
    assert tree == assemble(Experiment, files, GIN_SIZED).tree


def test_the_evaluators_and_the_data_share_their_tasks():
    tree = tree_of("quickstart", "data.tasks.temperature=3.0")
    assert [e.tasks.temperature for e in (*tree.evaluators, tree.data)] == [3.0] * 3
    assert tree.evaluators[0].tasks is tree.data.tasks


def test_a_module_that_a_config_holds_twice_is_refused(tmp_path, monkeypatch):
    """As in fiddle, one config makes one object; flax would tie the parameters of the two."""
    write_builder(tmp_path, monkeypatch, "    blocks[1].attention = blocks[0].attention\n")
    with pytest.raises(ConfigError, match="would share their parameters"):
        tree_of("my_trials:make()")


# Builders of one's own.


def write_builder(tmp_path, monkeypatch, body="", name="my_trials"):
    (tmp_path / f"{name}.py").write_text(
        "from gshard_exp.config import fiddle_presets\n"
        "def make(layers=12):\n"
        "    config = fiddle_presets.moe_128e_12l()\n"
        "    config.model.module.encoder.num_layers = layers\n"
        f"    blocks = config.model.module.encoder.pattern\n{body}"
        "    return config\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("expression", ["my_trials:make(layers=8)", "my_trials.make(8)"])
def test_a_builder_of_ones_own_is_called_with_its_arguments(tmp_path, monkeypatch, expression):
    write_builder(tmp_path, monkeypatch)
    assert tree_of(expression).model.module.encoder.num_layers == 8


def test_who_set_a_value_is_the_line_of_the_builder_or_the_flag(tmp_path, monkeypatch):
    write_builder(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    assignment = "model.module.decoder.num_layers=4"
    assembled = assemble_fiddle(Experiment, "my_trials:make", [*HERE, assignment])
    assert str(assembled.where("model.module.encoder.num_layers")) == "my_trials.py:4"
    flag = f"command line: --fdl_set={assignment}"
    assert str(assembled.where("model.module.decoder.num_layers")) == flag
    assert str(assembled.where("model.module.encoder.pattern[1].ffn.router_jitter")) == "default"


def test_who_set_a_value_by_selector_is_the_line_of_the_builder(tmp_path, monkeypatch):
    select = "    selectors.select(config, MoeLayer).set(num_experts=4)\n"
    write_builder(tmp_path, monkeypatch, select)
    text = (tmp_path / "my_trials.py").read_text()
    imports = "from fiddle import selectors; from gshard_exp.moe.layer import MoeLayer; "
    (tmp_path / "my_trials.py").write_text(imports + text)
    monkeypatch.chdir(tmp_path)
    assembled = assemble_fiddle(Experiment, "my_trials:make", HERE)
    assert (
        str(assembled.where("model.module.encoder.pattern[1].ffn.num_experts")) == "my_trials.py:6"
    )


def test_a_config_made_of_gin_files_remembers_their_lines():
    name = COMPLETE[0]
    text = (shipped_root() / name).read_text().splitlines()
    line = next(n for n, row in enumerate(text, 1) if row.startswith("BATCH_SIZE"))
    expression = f"of_gin('{name}', NUM_HEADS=4)"
    assembled = assemble_fiddle(Experiment, expression, HERE)
    assert str(assembled.where("batch_size")) == f"{name}:{line}"
    heads = "model.module.encoder.pattern[0].attention.num_heads"
    assert str(assembled.where(heads)) == f"command line: --fdl_config={expression}"


def test_an_auto_config_is_a_builder(tmp_path, monkeypatch):
    (tmp_path / "automatic.py").write_text(
        "from fiddle.experimental import auto_config\n"
        "from gshard_exp.train.experiment import Experiment\n"
        "@auto_config.auto_config\n"
        "def make():\n"
        "    return Experiment(model_dir='x', train_steps=3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load("automatic:make").train_steps == 3


def test_flags_do_not_change_what_a_builder_keeps(tmp_path, monkeypatch):
    (tmp_path / "keeps.py").write_text(
        "from gshard_exp.config import fiddle_presets\n"
        "KEPT = fiddle_presets.quickstart()\n"
        "def make():\n"
        "    return KEPT\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert tree_of("keeps:make", "train_steps=3").train_steps == 3
    assert tree_of("keeps:make").train_steps == 1200


# --fdl_set.


@pytest.mark.parametrize(
    ("assignment", "get", "value"),
    [
        ("train_steps=7", lambda t: t.train_steps, 7),
        ("model.module.encoder.pattern[1].ffn.num_experts=4", None, 4),
        ("lengths['inputs']=128", lambda t: t.lengths["inputs"], 128),
        ("model_dir=runs/a=b", lambda t: t.model_dir, "runs/a=b"),
        ("model_dir='7'", lambda t: t.model_dir, "7"),
        ("data.tasks.languages=['de', 'sw']", lambda t: t.data.tasks.languages, ["de", "sw"]),
        ("data.tasks.progress=false", lambda t: t.data.tasks.progress, False),
        ("evaluators[0].at_start=True", lambda t: t.evaluators[0].at_start, True),
    ],
)
def test_a_flag_sets_one_value(assignment, get, value):
    get = get or (lambda t: t.model.module.encoder.pattern[1].ffn.num_experts)
    assert get(tree_of("quickstart", assignment)) == value


def test_the_last_flag_wins():
    assert tree_of("quickstart", "seed=1", "seed=2").seed == 2


def test_a_flag_reaches_into_a_default(tmp_path, monkeypatch):
    write_builder(tmp_path, monkeypatch, "    del config.mesh\n")
    mesh = tree_of("my_trials:make", "mesh.expert=2").mesh
    assert (mesh.data, mesh.expert, mesh.model) == (1, 2, 1)


# Mistakes.


def complaint(expression, *assignments, here=HERE):
    with pytest.raises(ConfigError) as caught:
        assemble_fiddle(Experiment, expression, [*here, *assignments])
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("model.module.encoder.num_layer", "model.module.encoder.num_layers"),
        ("encoder.num_layers", "model.module.encoder.num_layers"),
        ("model.module.encoder.pattern[2].ffn", "model.module.encoder.pattern[1].ffn"),
        ("lengths['input']", "lengths['inputs']"),
        ("train_step", "train_steps"),
        ("model.module.name", "model.module"),
    ],
)
def test_an_unknown_path_is_answered_with_the_three_nearest(path, near):
    message = complaint("quickstart", f"{path}=4")
    assert f"experiment.Experiment has no '{path}'." in message
    assert f"set at: command line: --fdl_set={path}=4" in message
    assert near in message.split("try: ")[1]
    assert len(re.split(", | or ", message.split("try: ")[1])) == 3


def test_an_unknown_preset_is_answered_with_the_three_nearest():
    message = complaint("moe_128e_13l")
    assert "There is no fiddle builder 'moe_128e_13l'." in message
    assert "set at: command line: --fdl_config=moe_128e_13l" in message
    assert "try: moe_128e_12l, moe_128e_36l or moe_" in message


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("no_such:make", "There is no module 'no_such'."),
        ("gshard_exp.config.fiddle_parts:exprimnt", "gshard_exp.config.fiddle_parts:experiment"),
        ("moe_128e_12l(", "Cannot read 'moe_128e_12l('"),
        ("moe_128e_12l(layers=3)", "got an unexpected keyword argument 'layers'"),
        ("base(batch_size=8)", "missing a required argument: 'lengths'"),
        ("gshard_exp.moe.capacity:rounded", "gshard_exp.moe.capacity has no function"),
        ("of_gin('gin/models/tyni.gin')", "gin/models/tiny.gin"),
        (f"small{SIZED}, routing='swich')", "There is no gin file 'gin/moe/swich.gin'."),
        ("os:getcwd", "os.getcwd returns a str. A builder returns an fdl.Config."),
    ],
)
def test_a_builder_that_cannot_be_called_is_refused(expression, said):
    message = complaint(expression)
    assert said in message
    assert f"set at: command line: --fdl_config={expression}" in message


def test_a_config_of_something_else_is_refused(tmp_path, monkeypatch):
    write_builder(tmp_path, monkeypatch, "    config = config.model\n")
    message = complaint("my_trials:make")
    assert "builds seq2seq.Seq2SeqModel. A run is made from an fdl.Config of" in message


def test_a_value_of_the_wrong_type_is_refused_where_it_was_set():
    message = complaint("quickstart", "model.module.encoder.num_layers=2.5")
    assert "num_layers is 2.5, of type float. It must be of type int." in message
    assert "set at: command line: --fdl_set=model.module.encoder.num_layers=2.5" in message


def test_a_value_that_a_constructor_refuses_names_the_line_of_the_builder(tmp_path, monkeypatch):
    write_builder(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    message = complaint("my_trials:make(layers=3)")
    assert "num_layers=3 is not a positive multiple of the 2 blocks" in message
    assert "set at: my_trials.py:4 (num_layers)" in message


def test_what_is_not_set_at_all_is_named_with_its_path():
    message = complaint("moe_128e_12l", here=[])
    assert "experiment.Experiment is built without model_dir." in message
    assert "try: --fdl_set=model_dir=VALUE" in message


def test_a_value_that_config_gin_cannot_hold_is_refused(tmp_path, monkeypatch):
    write_builder(tmp_path, monkeypatch, "    config.data = lambda: None\n")
    monkeypatch.chdir(tmp_path)
    message = complaint("my_trials:make")
    assert "data is <function make.<locals>.<lambda>" in message
    assert "set at: my_trials.py:6" in message


@pytest.mark.parametrize("assignment", ["seed", "=3", "seed=[1"])
def test_a_flag_that_sets_nothing_is_refused(assignment):
    assert f"set at: command line: --fdl_set={assignment}" in complaint("quickstart", assignment)


def test_an_item_of_a_tuple_is_not_replaced():
    assert "is an item of a tuple" in complaint("quickstart", "evaluators[0]=3")


# Round trips.


@pytest.mark.parametrize("name", COMPLETE)
def test_a_gin_run_becomes_fiddle_code_that_builds_an_equal_tree(name):
    subject = read_subject(name, ["MODEL_DIR=x"])
    assert built(written_as(subject, "fiddle")) == subject.assembled.tree


@pytest.mark.parametrize("name", COMPLETE)
def test_a_fiddle_config_becomes_a_gin_file_that_assembles_to_an_equal_tree(name, tmp_path):
    subject = read_subject(f"fdl:{expression_of(name)}", assignments=HERE)
    (tmp_path / "config.gin").write_text(written_as(subject, "gin"))
    assert assemble(Experiment, [str(tmp_path / "config.gin")]).tree == subject.assembled.tree


def test_there_and_back_again(tmp_path, monkeypatch):
    start = read_subject(COMPLETE[-1], ["MODEL_DIR=x"])
    (tmp_path / "there.py").write_text(written_as(start, "fiddle"))
    monkeypatch.syspath_prepend(tmp_path)
    there = assemble_fiddle(Experiment, "there:config")
    (tmp_path / "back.gin").write_text(operative_config(there))
    assert assemble(Experiment, [str(tmp_path / "back.gin")]).tree == start.assembled.tree


def test_what_is_shared_in_fiddle_is_a_variable_of_the_code():
    code = written_as(read_subject("fdl:quickstart"), "fiddle")
    assert code.count("fdl.Config(tasks.TranslationTasks") == 0
    assert code.count("tasks.TranslationTasks,") == 1
    assert max(map(len, code.splitlines())) <= 100


def test_a_place_that_a_run_has_to_choose_is_left_open(tmp_path):
    subject = read_subject(COMPLETE[0])
    assert "model_dir" not in written_as(subject, "fiddle")
    text = written_as(subject, "gin")
    assert "MODEL_DIR = %gin.REQUIRED" in text
    (tmp_path / "config.gin").write_text(text)
    again = assemble(Experiment, [str(tmp_path / "config.gin")], ["MODEL_DIR=y"]).tree
    assert again == assemble(Experiment, [COMPLETE[0]], ["MODEL_DIR=y"]).tree


def test_the_code_needs_no_more_than_fiddle_and_our_modules():
    code = ast.parse(written_as(read_subject(COMPLETE[0]), "fiddle"))
    imported = {
        getattr(n, "module", None) or n.names[0].name
        for n in code.body
        if isinstance(n, (ast.Import, ast.ImportFrom))
    }
    assert {name.split(".")[0] for name in imported} == {"fiddle", "gshard_exp"}


def test_an_argument_that_is_a_bound_function_goes_both_ways(tmp_path, monkeypatch):
    """`@f` in gin is `fdl.Partial(f)` in fiddle."""
    import gin_toys

    monkeypatch.syspath_prepend(Path(gin_toys.__file__).parent)
    body = "from __gin__ import dynamic_registration\nimport gin_toys\n"
    body += "gin_toys.Experiment.pair = @gin_toys.Pair()\n"
    body += "gin_toys.Pair.left = [@gin_toys.top2, @gin_toys.relu]\n"
    body += "gin_toys.top2.jitter = 0.5\n"
    (tmp_path / "toys.gin").write_text(body)
    start = assemble(gin_toys.Experiment, [str(tmp_path / "toys.gin")])
    from gshard_exp.config.to_fiddle import fiddle_code

    code = fiddle_code(start)
    assert "fdl.Partial(gin_toys.top2, jitter=0.5)" in code
    assert built(code) == start.tree
    (tmp_path / "toys_code.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    there = assemble_fiddle(gin_toys.Experiment, "toys_code:config")
    (tmp_path / "back.gin").write_text(operative_config(there))
    assert assemble(gin_toys.Experiment, [str(tmp_path / "back.gin")]).tree == start.tree

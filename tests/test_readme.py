"""README.md: code of one's own, as it stands there, and its commands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import made_runs
import pytest
import tiny_run

from gshard_exp import cli

pytestmark = pytest.mark.usefixtures("quick_compilation")
REPO = Path(__file__).parent.parent
README = (REPO / "README.md").read_text()
READMES = [REPO / "README.md", *sorted(REPO.glob("experiments/*/README.md"))]
# What makes the quickstart small and free of data packages; what is trained stays of its kind.
SHRUNK = {
    "TRAIN_STEPS": 2,
    "BATCH_SIZE": 4,
    "TASK_FEATURE_LENGTHS": "{'inputs': 8, 'targets': 8}",
    "GROUP_SIZE": 16,
    "EMBED_DIM": 16,
    "EXPERT_MLP_DIM": 32,
    "NUM_HEADS": 2,
    "HEAD_DIM": 8,
    "NUM_EXPERTS": 4,
    "SOURCE_VOCAB_SIZE": 40,
    "TARGET_VOCAB_SIZE": 40,
}


def section(title):
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def commands(text):
    lines = "".join(blocks(text, "sh")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def of_ours(text):
    """The arguments of each `gshard-exp` command, without what only concerns the shell."""
    found = []
    for words in commands(text):
        if "gshard-exp" in words:
            arguments = words[words.index("gshard-exp") + 1 :]
            found.append(arguments[: arguments.index("<")] if "<" in arguments else arguments)
    return found


EVERY = [argv for readme in READMES for argv in of_ours(readme.read_text())]


@pytest.mark.parametrize("argv", EVERY, ids=" ".join)
def test_every_command_of_a_readme_is_one_of_the_command_line_s(argv):
    cli._parse(argv)


def test_no_command_of_a_readme_is_overlooked():
    starts = [re.findall(r"^(?:\w+=\w+ )?gshard-exp ", path.read_text(), re.M) for path in READMES]
    assert len(EVERY) == sum(map(len, starts)) > 20


def test_the_commands_that_only_look_work(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one of them writes a picture
    argvs = of_ours(section("Look before you run"))
    assert {argv[0] for argv in argvs} == {"show", "diff", "check", "components"}
    for argv in argvs:
        status, out, err = command(*argv)
        assert (status, err) == (0, "") and out


@pytest.fixture
def router(tmp_path):
    """Write the two files of the section into a folder."""
    code, config = blocks(section("A router of your own"), "python")
    (tmp_path / "my_router.py").write_text(code)
    (tmp_path / "my_router.gin").write_text(config)
    return tmp_path


def test_the_router_has_under_20_lines(router):
    assert len((router / "my_router.py").read_text().splitlines()) < 20


def test_the_router_trains_by_its_command_without_a_change_to_the_package(router):
    """In a process that gets the folder from nothing but the command line's own start."""
    (argv,) = commands(section("A router of your own"))
    assert argv[:2] == ["gshard-exp", "train"]
    flags = [f"--gin.{name}={value}" for name, value in SHRUNK.items()]
    flags += [f"--gin.{binding}" for binding in tiny_run.SMALL]
    start = "import sys; from gshard_exp.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", start, *argv[1:], "--gin_file=gin/tasks/random.gin", *flags],
        cwd=router,
        env=os.environ | {"PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    run = router / "runs" / "exploring"
    assert [record["step"] for record in tiny_run.records(run)] == [2]
    config = (run / "config.gin").read_text()
    for stack in ("encoder", "decoder"):
        assert f"@model_module_{stack}_pattern_0_ffn_gating/my_router.ExploringGating()" in config
    assert "my_router.ExploringGating.share = 0.05  # my_router.gin:5\n" in config


def test_the_router_is_known_to_fiddle_too(router, monkeypatch, capsys):
    monkeypatch.syspath_prepend(router)
    monkeypatch.chdir(router)
    files = ["--gin_file=experiments/quickstart/quickstart.gin", "--gin_file=my_router.gin"]
    assert cli.main(["show", *files, "--as=fiddle"]) == 0
    out = capsys.readouterr().out
    sys.modules.pop("my_router")
    assert "\nimport my_router\n" in out
    assert out.count("fdl.Config(my_router.ExploringGating, share=0.05)") == 2


def test_the_commands_of_the_section_on_fiddle_work(tmp_path, monkeypatch, capsys):
    text = section("fiddle instead of gin")
    (tmp_path / "my_builders.py").write_text(*blocks(text, "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    verbs = set()
    for _, verb, *arguments in commands(text):
        verbs.add(verb)
        arguments += ["--dry_run"] * (verb == "train")
        assert cli.main([verb, *arguments]) == 0
        said, complaints = capsys.readouterr()
        assert said and not complaints
        if "my_builders:sixteen_experts" in " ".join(arguments):
            assert said.count("ffn.num_experts = 16  # my_builders.py:") == 2
    sys.modules.pop("my_builders")
    assert verbs == {"train", "show", "diff"}


def test_the_program_of_the_section_on_sharding_prints_what_its_annotations_say(capsys):
    (program,) = blocks(section("Sharding by hand"), "python")
    exec(compile(program, "README.md", "exec"), {})
    assert capsys.readouterr().out == "(2, 6) (2, 2)\n"


def test_the_command_that_measures_collectives_draws_its_plot(tmp_path, monkeypatch, capsys):
    ((platform, _, *argv),) = commands(section("Sharding by hand"))
    assert (platform, argv[0]) == ("JAX_PLATFORMS=cpu", "collectives")
    monkeypatch.chdir(tmp_path)
    assert cli.main([*argv, "--sizes=1KB", "--runs=1"]) == 0
    assert "collective-permute" in capsys.readouterr().out
    assert (tmp_path / "collectives.png").stat().st_size > 1000


def test_the_commands_of_the_section_on_sweeps_work(tmp_path, monkeypatch, command):
    """Shrunk, on random tokens, by an optimizer that compiles quickly; one of 5 points trains."""
    text = section("Run a sweep")
    (tmp_path / "depth.gin").write_text(*blocks(text, "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    small = [f"--set={name}={value}" for name, value in SHRUNK.items() if name != "NUM_EXPERTS"]
    random = "DATA=@batches.RandomData()", "EVALUATORS=()"
    sizes = [f"batches.RandomData.{side}_vocab_size=40" for side in ("source", "target")]
    adamw = [binding for binding in tiny_run.SMALL if "optimizer." in binding]
    small += [f"--set={binding}" for binding in (*random, *sizes, *adamw)]
    said = {}
    for _, verb, of_sweep, *arguments in commands(text):
        assert verb == "sweep"
        only = "l2-e16" if of_sweep == "run" else "l2-e*"
        status, said[of_sweep], err = command(verb, of_sweep, *arguments, f"--only={only}", *small)
        assert status == 0, err
    assert list(said) == ["plan", "run", "status", "commands"]
    rows = [line.split() for line in said["plan"].splitlines()]
    assert rows[0][:5] == ["point", "layers", "experts", "params", "active"]
    assert [row[0] for row in rows[1:3]] == ["l2-e4", "l2-e16"]
    assert "1 done" in said["run"]
    assert "1 done" in said["status"]
    assert [record["step"] for record in tiny_run.records("runs/depth/l2-e16")] == [2]
    assert len(said["commands"].splitlines()) == 2


def test_the_points_of_the_sweep_are_those_that_the_text_names(tmp_path):
    from gshard_exp.sweep import prepare

    text = section("Run a sweep")
    (tmp_path / "depth.gin").write_text(*blocks(text, "python"))
    file = prepare.read_sweep(str(tmp_path / "depth.gin"))
    names = [point.name for point in prepare.prepare(file)]
    assert len(names) == 5
    assert f"Its points are `{names[0]}`, `{names[1]}`, ... `{names[-1]}`" in text


def test_the_commands_that_report_write_their_pages(command, tmp_path, monkeypatch):
    for name in ("quickstart", "mine"):
        made_runs.make_run(tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    argvs = of_ours(section("Read the results"))
    assert len(argvs) == 2 and {argv[0] for argv in argvs} == {"report"}
    for argv in argvs:
        status, out, _ = command(*argv)
        assert status == 0 and out
    for folder, words in (("report", "Loss"), ("compared", "Paper: tokens to reach a loss")):
        written = {path.name for path in (tmp_path / "runs" / folder).iterdir()}
        assert words in (tmp_path / "runs" / folder / "index.html").read_text()
        kinds = {f"{name}.md" for name in ("points", "tokens_to_reach", "fits", "settings")}
        assert written >= kinds | {"index.html", "report.json", "plots", "points.csv"}

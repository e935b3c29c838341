"""Where gin files are found."""

from pathlib import Path

import gin_toys
import pytest

from gshard_exp.config import ConfigError, assemble, find_gin_files, search, shipped_root

STEPS = "gin_toys.Experiment.train_steps = "


def steps(*files: str, search_paths: tuple[str, ...] = ()) -> int:
    return assemble(gin_toys.Experiment, files, search_paths=search_paths).tree.train_steps


@pytest.fixture
def ours(tmp_path, monkeypatch):
    root = tmp_path / "ours"
    monkeypatch.setattr(search, "shipped_root", lambda: root)
    return root


def test_a_path_relative_to_the_current_folder_comes_first(write, ours):
    write("gin/a.gin", STEPS + "1")
    write("mine/gin/a.gin", STEPS + "2")
    write("ours/gin/a.gin", STEPS + "3")
    assert steps("gin/a.gin", search_paths=("mine",)) == 1


def test_the_users_folders_come_before_ours(write, ours):
    write("mine/gin/a.gin", STEPS + "2")
    write("ours/gin/a.gin", STEPS + "3")
    assert steps("gin/a.gin", search_paths=("mine",)) == 2
    assert steps("gin/a.gin") == 3


def test_an_include_is_searched_in_the_same_folders(write, ours):
    write("ours/gin/models/tiny.gin", STEPS + "3")
    write("run.gin", "include 'gin/models/tiny.gin'\n")
    assert steps("run.gin") == 3


def test_an_absolute_path_is_taken_as_it_is(write, ours, tmp_path):
    write("a.gin", STEPS + "4")
    assert steps(str(tmp_path / "a.gin")) == 4


def test_a_missing_file_names_the_nearest_ones_and_the_flag(write, ours):
    write("ours/gin/models/moe_tiny.gin", "")
    write("ours/gin/tasks/toy.gin", "")
    with pytest.raises(ConfigError) as caught:
        steps("gin/models/moe_tinny.gin")
    text = str(caught.value)
    assert "There is no gin file 'gin/models/moe_tinny.gin'." in text
    assert "set at: command line: --gin_file=gin/models/moe_tinny.gin" in text
    assert "try: gin/models/moe_tiny.gin" in text
    assert str(ours) in text


def test_a_missing_include_names_the_line_of_the_including_file(write, ours):
    write("run.gin", "include 'gin/models/tinny.gin'\n")
    write("gin/models/tiny.gin", "")
    with pytest.raises(ConfigError) as caught:
        steps("run.gin")
    assert "set at: run.gin:3" in str(caught.value)
    assert "try: gin/models/tiny.gin" in str(caught.value)


def test_a_file_that_includes_itself_is_refused(write, ours):
    write("a.gin", "include 'b.gin'\n")
    write("b.gin", "include 'a.gin'\n")
    with pytest.raises(ConfigError, match="includes itself") as caught:
        steps("a.gin")
    assert "set at: b.gin:3" in str(caught.value)


def test_the_same_file_may_be_included_twice(write, ours):
    write("base.gin", STEPS + "3")
    write("run.gin", "include 'base.gin'\ninclude 'base.gin'\n")
    assert steps("run.gin") == 3


def test_our_root_of_a_checkout_is_the_folder_above_the_package():
    package = Path(search.__file__).parents[1]
    assert shipped_root() == package.parent
    assert (shipped_root() / "setup.py").is_file()


def test_our_root_of_an_installed_wheel_is_the_package(tmp_path, monkeypatch):
    # Beside the package lies gin-config, whose folder is called gin as well.
    (tmp_path / "gin").mkdir()
    (tmp_path / "gshard_exp" / "gin").mkdir(parents=True)
    monkeypatch.setattr(search, "__file__", str(tmp_path / "gshard_exp" / "config" / "search.py"))
    assert shipped_root() == tmp_path / "gshard_exp"


def test_the_shipped_gin_files_are_those_in_gin_and_experiments(tmp_path):
    for name in ("gin/runs/a.gin", "experiments/e/b.gin", "other/c.gin", "gin/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    names = [str(path.relative_to(tmp_path)) for path in find_gin_files([tmp_path])]
    assert names == ["experiments/e/b.gin", "gin/runs/a.gin"]

"""A folder for gin files, and a short way to assemble the toy experiment from them."""

from collections.abc import Callable
from pathlib import Path

import gin_toys
import pytest

from gshard_exp.config import Assembled, ConfigError, assemble

HEAD = "from __gin__ import dynamic_registration\nimport gin_toys\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write a gin file below the current folder; the first binding stands on line 3."""
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, body: str, head: str = HEAD) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + body)
        return name

    return write_file


@pytest.fixture
def build(write: Callable[..., str]) -> Callable[..., Assembled[gin_toys.Experiment]]:
    """Assemble the toy experiment from the body of one gin file, `run.gin`, and flags."""

    def build_experiment(body: str, *flags: str) -> Assembled[gin_toys.Experiment]:
        return assemble(gin_toys.Experiment, [write("run.gin", body)], flags)

    return build_experiment


@pytest.fixture
def complaint(build: Callable[..., Assembled[gin_toys.Experiment]]) -> Callable[..., str]:
    """Assemble what must fail; return the text that the user would read."""

    def complaint_of(body: str, *flags: str) -> str:
        with pytest.raises(ConfigError) as caught:
            build(body, *flags)
        return str(caught.value)

    return complaint_of

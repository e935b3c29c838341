"""Linen modules are dataclasses, with two fields of linen's own."""

import dataclasses
import sys
import types
from typing import Any

import flax.linen as nn
import gin_toys
import jax.numpy as jnp
import pytest
from fiddle import build as fiddle_build
from fiddle.experimental.dataclasses import convert_dataclasses_to_configs

from gshard_exp.config import ConfigError, assemble, flatten, operative_config


class Mlp(nn.Module):
    width: int
    dtype: Any = jnp.float32
    sizes: tuple[int, ...] = (1, 2)


class Encoder(nn.Module):
    block: nn.Module
    repeats: int = 2


@dataclasses.dataclass(frozen=True)
class Experiment:
    module: nn.Module


BODY = """
import linen_toys
from jax import numpy as jnp
linen_toys.Experiment.module = @linen_toys.Encoder()
linen_toys.Encoder.block = @linen_toys.Mlp()
linen_toys.Mlp.width = 3
linen_toys.Mlp.dtype = @jnp.bfloat16
"""


@pytest.fixture
def assembled(write, monkeypatch):
    module = types.ModuleType("linen_toys")
    for thing in (Mlp, Encoder, Experiment):
        setattr(module, thing.__name__, thing)
    monkeypatch.setitem(sys.modules, "linen_toys", module)
    return assemble(Experiment, [write("linen.gin", BODY)])


def test_a_module_is_built_with_its_settings(assembled):
    assert assembled.tree.module == Encoder(Mlp(3, jnp.bfloat16))


def test_parent_and_name_are_no_settings(assembled):
    leaves = flatten(assembled.tree)
    assert set(leaves) == {
        "module.block.width",
        "module.block.dtype",
        "module.block.sizes[0]",
        "module.block.sizes[1]",
        "module.repeats",
    }
    assert "parent" not in operative_config(assembled)


def test_the_text_assembles_to_an_equal_module(assembled, tmp_path):
    (tmp_path / "config.gin").write_text(operative_config(assembled))
    assert assemble(Experiment, ["config.gin"]).tree == assembled.tree


def test_a_misspelt_parameter_of_a_module_is_not_answered_with_parent_or_name(write, assembled):
    write("wrong.gin", BODY + "linen_toys.Mlp.with = 3\n".replace("with", "wdith"))
    with pytest.raises(ConfigError) as caught:
        assemble(Experiment, ["wrong.gin"])
    assert str(caught.value).endswith("try: width, dtype or sizes")


def test_fiddle_converts_the_tree_to_a_config_and_back(assembled):
    config = convert_dataclasses_to_configs(assembled.tree, allow_post_init=True)
    config.module.repeats = 4
    assert fiddle_build(config).module == Encoder(Mlp(3, jnp.bfloat16), repeats=4)
    assert gin_toys.Experiment() == fiddle_build(
        convert_dataclasses_to_configs(gin_toys.Experiment(), allow_post_init=True)
    )

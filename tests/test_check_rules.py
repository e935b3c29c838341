"""`gshard-exp check` applies the sharding rules to all of a step, on a mesh that is not there."""

import re

import tiny_run

from gshard_exp.config import shipped_root

TINY = tiny_run.TINY


def test_check_refuses_optimizer_state_that_does_not_divide_over_the_mesh(command):
    """The width of 16 is no multiple of 3; only ZeRO splits it over the 3 parts of `data`."""
    flags = ("--gin.DATA_PARTITIONS=3", "--gin.BATCH_SIZE=6")
    assert command("check", TINY, *flags)[0] == 0
    status, out, _ = command("check", f"{TINY},gin/sharding/zero1.gin", *flags)
    assert status == 2
    assert "size 16 on 'embed', which the mesh splits into 3" in out
    assert re.search(r"set at: gin/sharding/zero1\.gin:\d+ \(rules\.optimizer\)", out)


def test_check_traces_the_step_on_a_mesh_that_is_not_there_if_asked(command, tmp_path):
    """A rule for rows' lengths that contradicts that of heads meets no parameter."""
    table = (shipped_root() / "gin/sharding/expert_parallel.gin").read_text()
    (tmp_path / "rules.gin").write_text(table.replace('"length", None', '"length", "model"'))
    name = f"{TINY},{tmp_path / 'rules.gin'}"
    flags = ("--gin.NUM_MODEL_PARTITIONS=2", "--gin.DATA_PARTITIONS=4")
    assert command("check", name, *flags)[0] == 0
    assert command("check", "--trace", TINY, *flags)[0] == 0
    status, out, _ = command("check", "--trace", name, *flags)
    assert status == 2
    assert "an activation" in out and "over the mesh axis 'model' twice" in out
    assert f"set at: {tmp_path / 'rules.gin'}:" in out

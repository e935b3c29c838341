"""`gshard-exp collectives`: what is measured, what it is compared with, and how it is shown."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from matplotlib import image

from gshard_exp import cli
from gshard_exp.sharding import figure9, hlo, primitives, primitives_report

SMALL = ["--devices=8", "--sizes=1KB,4KB", "--runs=3"]
NAMES = ["all-reduce", "all-gather", "all-to-all", "collective-permute"]


def test_measures_every_primitive_at_every_size_and_number_of_partitions(tmp_path):
    file = tmp_path / "out.json"
    assert cli.main(["collectives", *SMALL, f"--json={file}"]) == 0
    report = json.loads(file.read_text())
    rows = report["measurements"]
    assert sorted((r["primitive"], r["size"], r["partitions"]) for r in rows) == sorted(
        (name, size, count) for name in NAMES for size in (1024, 4096) for count in (2, 4, 8)
    )
    for row in rows:
        assert len(row["seconds"]) == 3
        assert row["median_s"] == sorted(row["seconds"])[1] > 0
        sent = primitives.PRIMITIVES[row["primitive"]].sent(row["partitions"]) * row["size"]
        assert row["bytes_per_second"] == pytest.approx(sent / row["median_s"])
    assert len(report["slopes"]) == 8
    assert all(np.isfinite(row["slope"]) for row in report["slopes"])
    assert "copying in its memory, not a network" in report["note"]


def test_the_table_has_the_same_and_the_published_curves_beside_it(capsys):
    assert cli.main(["collectives", "--devices=4", "--sizes=8KB", "--runs=2"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "host" in lines[0] and "cpu" in lines[0]
    for name in NAMES:
        assert [line.split()[1:3] for line in lines if line.startswith(name)][:2] == [
            ["8KB", "2"],
            ["8KB", "4"],
        ]
    assert figure9.SOURCE in out
    assert any(line.split()[:3] == ["all-to-all", "32MB", "1106"] for line in lines)


def test_median_spread_and_rate_are_those_of_the_times_in_table_and_json(
    tmp_path, capsys, monkeypatch
):
    # In order 10, 20, 30, 40 and 80 us: quartiles 20 and 40, spread (40 - 20) / 2 of the median 30.
    times = (40e-6, 10e-6, 80e-6, 20e-6, 30e-6)
    measured = primitives.Measurement("all-reduce", 32 * 2**20, 4, times)
    monkeypatch.setattr(primitives_report, "measure", lambda *_, **__: [measured])
    file = tmp_path / "out.json"
    flags = ["--devices=4", "--sizes=32MB"]
    assert cli.main(["collectives", *flags, f"--json={file}"]) == 0
    (row,) = json.loads(file.read_text())["measurements"]
    assert row["median_s"] == pytest.approx(30e-6)
    assert row["spread"] == pytest.approx(1 / 3)
    # An all-reduce over 4 sends 2 * 3/4 of the size: 48 MB = 50,331,648 bytes in 30 us.
    assert row["bytes_per_second"] == pytest.approx(50_331_648 / 30e-6)
    capsys.readouterr()
    assert cli.main(["collectives", *flags]) == 0
    head, shown = (re.split("  +", line) for line in capsys.readouterr().out.splitlines()[2:4])
    assert dict(zip(head, shown, strict=True)) == {
        "primitive": "all-reduce",
        "size": "32MB",
        "partitions": "4",
        "median us": "30",
        "spread": "33%",
        "GB/s sent by each": "1677.72",
    }


def test_json_on_the_output_is_all_that_stands_there(capsys):
    assert cli.main(["collectives", "--devices=2", "--sizes=1KB", "--runs=1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["slope"] for row in report["slopes"]] == [None] * 4  # one number of partitions


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot_shows_something(suffix, tmp_path):
    file = tmp_path / f"plot.{suffix}"
    assert cli.main(["collectives", *SMALL, f"--plot={file}"]) == 0
    if suffix == "svg":
        assert all(name in file.read_text() for name in ("<svg", *NAMES))
    else:
        pixels = image.imread(file)[..., :3]
        assert len(np.unique((pixels * 8).astype(int).reshape(-1, 3), axis=0)) > 8


@pytest.fixture
def mesh():
    return Mesh(np.asarray(jax.devices()), ("partition",))


@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_one_collective_of_the_size_asked_for(name, mesh):
    exchange, x = primitives.program(name, mesh, 4096)
    ((kind, count),) = [(c.kind, c.bytes) for c in hlo.parse(exchange.as_text()).collectives()]
    assert (kind, count) == (name, 4096)
    assert x.addressable_shards[3].data.nbytes == 4096


def test_the_programs_move_what_their_names_say(mesh):
    given = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    want = {
        "all-reduce": np.tile(given.sum(axis=0), (8, 1)),
        "all-gather": np.tile(given[:, :2].reshape(-1), (8, 1)),
        "all-to-all": given.reshape(8, 8, 2).swapaxes(0, 1).reshape(8, 16),
        "collective-permute": np.roll(given, 1, axis=0),
    }
    for name in NAMES:
        exchange, x = primitives.program(name, mesh, 64)
        np.testing.assert_array_equal(x, given.reshape(-1))
        np.testing.assert_array_equal(jnp.reshape(exchange(x), (8, 16)), want[name])


def test_a_size_that_does_not_divide_is_rounded_down(mesh):
    exchange, x = primitives.program("all-to-all", mesh, 4096 + 20)
    assert x.addressable_shards[0].data.nbytes == 4096
    assert exchange(x).shape == x.shape


def test_the_published_slopes_are_near_those_of_the_paper():
    # All-to-all: its 9-fold time over 128 times the partitions is a slope of log 9 / log 128 = .45.
    for (primitive, _), slope in figure9.published_slopes().items():
        assert slope == pytest.approx(figure9.EXPONENTS[primitive], abs=0.2)


def test_the_slope_of_a_power_is_its_exponent():
    assert primitives.log_log_slope({n: 3e-6 * n**0.5 for n in (2, 4, 8)}) == pytest.approx(0.5)


def test_partitions_are_powers_of_two_and_all_devices():
    assert primitives.partition_counts(8) == [2, 4, 8]
    assert primitives.partition_counts(6) == [2, 4, 6]
    assert primitives.partition_counts(2) == [2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices=16"], "needs 16 devices and there are 8"),
        (["--devices=1"], "there is 1 cpu device, and nothing to exchange. On CPU"),
        (["--devices=0"], "has no meaning"),
        (["--sizes=8"], "the size '8' is no whole number of KB, MB or GB"),
        (["--sizes=1MB,"], "the size '' is no whole number"),
        (["--sizes=0KB"], "the size '0KB'"),
        (["--runs=0"], "runs=0 has to be at least 1"),
        (["--plot=x.mine"], "'x.mine' has a suffix that matplotlib does not know"),
        (["--plot=nowhere/x.png"], "the folder of the plot 'nowhere/x.png' is not there"),
    ],
)
def test_a_wrong_flag_is_one_error(flags, message, capsys):
    assert cli.main(["collectives", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error

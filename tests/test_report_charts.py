"""Charts of a report: what is drawn, in which colours, and the files of it."""

import json
from pathlib import Path

import made_runs
import numpy as np
import pytest

from gshard_exp import reports
from gshard_exp.sweep import charts, heats, laws, plots, published, report, tables
from gshard_exp.sweep.runs import Model, Run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return report.collect([made_runs.make_sweep(tmp_path_factory.mktemp("made") / "sweep")])


def drawn(found, name, **how):
    (chart,) = [chart for chart in charts.all_charts(found, **how) if chart.name == name]
    return chart


def bare(name, lines=(), axes=None):
    return Run(name, Path(name), axes or {}, Model(), {}, lines, (), None, {}, ())


def test_a_hundred_languages_are_smoothed_to_the_paper_s_91_points():
    assert len(charts.moving_mean([0.0] * 100, charts.smoothing_window(100))) == 91
    assert [charts.smoothing_window(n) for n in (1, 10, 30, 100, 200)] == [1, 1, 3, 10, 10]
    assert charts.moving_mean([1.0, 2.0, 6.0, 3.0], 2) == [1.5, 4.0, 4.5]


def test_delta_bleu_by_language_goes_from_high_to_low_resource(found):
    series = drawn(found, "delta_bleu_by_language").series[0]
    assert len(series.points) == 28
    xs, ys = zip(*series.points, strict=True)
    np.testing.assert_allclose([xs[0], xs[-1]], [5.0, 95.0])
    first = [made_runs.bleu(i, 4, 4) - made_runs.baseline(i) for i in range(3)]
    np.testing.assert_allclose(ys[0], np.mean(first))
    assert ys[-1] > ys[0]
    assert series.notes[0] == "l00, l01, l02 (9.4K to 10K pairs)"


def test_the_window_can_be_chosen(found):
    series = drawn(found, "bleu_by_language", window=1).series[0]
    assert [y for _, y in series.points] == [made_runs.bleu(i, 4, 4) for i in range(30)]
    assert len(drawn(found, "bleu_by_language", window=99).series[0].points) == 1


def test_quality_stands_over_measured_and_over_computed_cost(found):
    for name, cost in (("delta_bleu_core_hours", "core_hours"), ("delta_bleu_flops", "flops")):
        for run, series in zip(found.runs, drawn(found, name).series, strict=True):
            assert series.points == [(getattr(run, cost), report.average(run, "delta_bleu"))]


def test_a_chart_without_a_point_is_not_drawn():
    nothing = report.Report("x", [bare("a")], (), (), ())
    assert charts.all_charts(nothing) == []


def test_colour_tells_one_axis_and_shape_the_other(found):
    look = charts.looks(found.runs)
    assert look["l4-e4"][0] == look["l4-e16"][0] != look["l8-e4"][0]
    assert look["l4-e4"][1] == look["l8-e4"][1] != look["l8-e16"][1]


def test_runs_of_no_sweep_get_every_colour_before_a_second_shape():
    look = charts.looks([bare(f"r{i}") for i in range(20)])
    assert len(set(look.values())) == 20
    assert look["r7"] == (7, 0) and look["r8"] == (0, 1)


def test_a_long_curve_keeps_its_ends_and_is_thinned_evenly_over_log_tokens():
    curve = [(float(n), 1.0 / n) for n in range(1, 100_001)]
    thin = charts.thinned(curve)
    assert thin[0] == curve[0] and thin[-1] == curve[-1]
    assert 200 < len(thin) <= charts.MOST_POINTS + 1
    decades = [sum(10**d <= n < 10 ** (d + 1) for n, _ in thin) for d in range(5)]
    assert min(decades[1:]) > 40


def test_load_is_over_the_mean_and_drops_are_by_step(found):
    run = found.runs[1]
    load, *drops = heats.heats([run])
    assert (load.rows, len(load.columns)) == (["encoder 1", "decoder 1"], 16)
    np.testing.assert_allclose(np.mean(load.values, axis=1), 1.0)
    line = run.lines[-1]["router/encoder/layer_1/expert_load/5"]
    np.testing.assert_allclose(load.values[0][5], 16 * line)
    assert [heat.name.rpartition("_l4")[0] for heat in drops] == list(heats._DROPS)
    assert drops[0].columns == [str(step) for step in range(10, 401, 10)]
    metric = "router/decoder/layer_1/fraction_dropped_first"
    assert drops[0].values[1] == [line[metric] for line in run.lines]


def test_layers_are_in_their_order_and_many_experts_come_as_deciles():
    lines = [
        {
            "step": 1,
            **{
                f"router/encoder/layer_{layer}/expert_load/p{10 * i}": 0.001 * (i + 5)
                for layer in (11, 3)
                for i in range(11)
            },
        }
    ]
    (load,) = heats.heats([bare("many", lines)])
    assert load.rows == ["encoder 3", "encoder 11"]
    assert load.columns[:2] == ["p0", "p10"] and load.column_label == "decile"
    np.testing.assert_allclose(load.values[0], [(i + 5) / 10 for i in range(11)])


def test_a_dense_run_has_no_heat_map():
    assert heats.heats([bare("dense", [{"step": 1, "loss": 2.0}])]) == []


def test_every_chart_becomes_a_png_and_an_svg_the_same_each_time(found, tmp_path):
    some = [drawn(found, "loss"), drawn(found, "bleu_flops"), heats.heats(found.runs[:1])[0]]
    files = plots.draw(some, tmp_path / "a")
    assert len(files) == 6
    for file in files:
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG" if file.suffix == ".png" else b"<?xml")
    again = plots.draw(some, tmp_path / "b")
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in again]


def test_ticks_of_a_logarithmic_axis_read_like_those_of_the_page():
    assert plots.log_ticks(9e3, 4e5) == ([1e4, 3e4, 1e5, 3e5], ["10K", "30K", "100K", "300K"])
    ticks, texts = plots.log_ticks(1.771e12, 1.777e12)
    assert len(ticks) > 2 and texts[0].startswith("1.77") and len(set(texts)) == len(texts)
    assert plots.log_ticks(1e-3, 1e6)[1][:2] == ["0.001", "0.01"]


def test_a_second_report_leaves_no_plot_of_the_first_and_nobody_else_s_file(tmp_path):
    nothing = report.Report("one", [bare("empty")], (), (), ())
    reports.write(nothing, tmp_path, published=True)
    (tmp_path / "plots" / "mine.png").write_bytes(b"mine")
    assert len(list((tmp_path / "plots").iterdir())) == 1 + 2 * 4
    reports.write(nothing, tmp_path)
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["mine.png"]
    assert not (tmp_path / "paper.md").exists() and (tmp_path / "points.md").exists()


def test_a_list_of_files_cannot_make_a_report_remove_others(tmp_path):
    outside, inside = tmp_path / "outside.md", tmp_path / "report" / "notes.txt"
    inside.parent.mkdir()
    outside.touch()
    inside.touch()
    listed = {"files": ["../outside.md", "notes.txt", "plots"]}
    (tmp_path / "report" / "report.json").write_text(json.dumps(listed))
    reports.write(report.Report("one", [bare("empty")], (), (), ()), tmp_path / "report")
    assert outside.exists() and inside.exists()


def test_runs_on_images_are_reported_in_their_own_unit():
    lines = [
        {
            "step": step,
            "cross_ent_loss_per_example": 2.0 / step,
            "timing/steps_per_second": 1.0,
            "timing/tokens_per_second": 64.0,
        }
        for step in (1, 2, 3)
    ]
    found = report.Report("images", [bare("vision", lines)], (), (), ())
    chart = drawn(found, "loss")
    assert chart.y.label == "cross entropy, nats per image"
    assert chart.series[0].points == [(64.0, 2.0), (128.0, 1.0), (192.0, 2.0 / 3)]


def test_the_plots_have_the_colours_of_the_page():
    css = (Path(plots.__file__).parent / "report.css").read_text()
    for index, colour in enumerate(plots.COLOURS):
        assert f"--c{index}: light-dark({colour}, " in css
    assert len(plots.COLOURS) == charts.COLOURS
    assert len(plots.MARKS) == len(plots.DASHES) == charts.SHAPES


def test_without_matplotlib_all_the_rest_is_written(found, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    said = reports.write(found, tmp_path)
    assert "matplotlib" in said[-1] and not (tmp_path / "plots").exists()
    assert "plots/loss.png" not in (tmp_path / "index.html").read_text()


def test_laws_are_fitted_where_there_are_points_and_refused_where_not(found):
    done = {(law.what, law.form): law for law in laws.all_laws(found)}
    law = done["l4-e4", "tokens, with asymptote"].fit
    low, high = law.intervals["tokens"]
    assert low < law.law.exponents[0] < high and law.held_out < 0.02
    assert abs(law.law.exponents[0] - 0.45) < 0.06  # the law is that of the made runs
    refused = done["all runs at 360K tokens", "active parameters"]
    assert refused.fit is None and "2 different values of active" in refused.refusal
    rows = laws.table(list(done.values())).rows
    assert len(rows) == 4 * 2 + 4 + 4
    assert sum(row[2].startswith("not fitted: ") for row in rows) == sum(
        law.fit is None for law in done.values()
    )


def test_laws_leave_the_warm_up_out():
    curve = [(float(n), 1.0) for n in range(1, 1001)]
    kept = laws.after_warm_up(curve)
    assert kept[0] == (100.0, 1.0) and kept[-1] == (1000.0, 1.0)
    assert len(kept) <= laws.CURVE_POINTS
    assert laws.loss_at([(1.0, 4.0), (3.0, 2.0)], 2.0) == 3.0


def test_the_paper_s_figures_are_those_that_stand_in_it():
    """Tables 1 to 3 and Figure 6 (arXiv 2006.16668v1, pages 16 to 19)."""
    by_name = {chart.name: chart for chart in published.charts()}
    reach = {s.name: dict(s.points) for s in by_name["paper_tokens_to_reach"].series}
    assert reach["MoE(2048E,36L)"] == {0.7: 82e9, 0.6: 175e9, 0.5: 542e9}
    assert reach["MoE(128E,12L)"] == {0.7: 995e9}
    cost = {s.name: s.points for s in by_name["paper_delta_bleu_core_years"].series}
    assert cost["MoE(2048E,36L)"] == [(22.4, 13.5)] and cost["T(96L)"] == [(235.5, 6.1)]
    curves = {s.name: s.points for s in by_name["paper_delta_bleu_by_language"].series}
    assert len(curves) == 7 and {len(points) for points in curves.values()} == {91}
    # The curves' means over languages are the table's averages, but for the smoothing at the ends.
    for name, points in curves.items():
        mean = np.mean([value for _, value in points])
        np.testing.assert_allclose(mean, cost[name][0][1], atol=0.35)
    for chart in by_name.values():
        assert chart.about.startswith("arXiv 2006.16668v1, ")


def test_the_figures_agree_with_those_of_the_paper_s_tables():
    repo = Path(__file__).parent.parent
    other = json.loads((repo / "experiments" / "paper_tables" / "published.json").read_text())
    for name, model in published.figures()["models"].items():
        row = other["tables_1_and_3"][name]
        assert (model["weights"], model["core_years"]) == (
            row["weights_printed"],
            row["core_years"],
        )


def test_tables_survive_bars_commas_and_missing_values():
    table = tables.Table(
        "t",
        "T",
        ("a", "b"),
        ("a", "b"),
        [("x|y", "-"), ("p,q", "1.5")],
        [("x|y", None), ("p,q", 1.5)],
    )
    assert tables.markdown(table).splitlines()[2:] == ["| x\\|y | - |", "| p,q | 1.5 |"]
    assert tables.csv_text(table) == 'a,b\nx|y,\n"p,q",1.5\n'
    assert tables.as_objects(table)[0] == {"a": "x|y", "b": None}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999.4, "999"),
        (999.6, "1K"),
        (1000, "1K"),
        (999_700, "1M"),
        (1.234e9, "1.23B"),
        (-5e12, "-5T"),
    ],
)
def test_large_numbers_are_written_short(value, text):
    assert report.si(value) == text


def test_points_of_one_name_in_two_sweeps_have_looks_of_their_own():
    axes = [{"layers": layers, "experts": experts} for layers in (4, 8) for experts in (2, 4)]
    runs = [bare(f"{sweep}{i}", axes=each) for sweep in "ab" for i, each in enumerate(axes)]
    assert len(set(charts.looks(runs).values())) == 8
    assert len(set(charts.looks([*runs[:4], bare("alone"), bare("another")]).values())) == 6

"""The paper's tables with ours beside them: published, ours, relative difference."""

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence

# Bars of Figure 8 and the parts of ours that they are.
FIGURE_8 = {
    "transformer_projection": "projections",
    "transformer_attention": "attention",
    "transformer_ffn": "dense FFN",
    "gate_einsums": "gate einsums",
    "gate_cumsum": "gate cumsum",
    "dispatch_combine_all_to_all": "dispatch and combine",
    "moe_ffn": "MoE FFN",
}
ENCODER_PAIRS = 9  # a dense layer and a sparse one, of 36 layers, half of which are the encoder's


@dataclasses.dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        name: of its file.
        title: a line above it.
        heads: of columns.
        rows: texts.
        remarks: what has to be said about its misses.
    """

    name: str
    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    remarks: tuple[str, ...] = ()


def difference(ours: float | None, published: float | None) -> str:
    """Return `+6 %`; a dash if either is not known."""
    if ours is None or not published:
        return "-"
    return f"{ours / published - 1:+.0%}"


def _number(value: float | None, form: str = "{:.3g}") -> str:
    return "-" if value is None else form.format(value)


def all_tables(plans: Mapping[str, dict], published: Mapping) -> list[Table]:
    """Make every table of the rows that were compiled."""
    return [
        _table_1(plans, published),
        _table_3(plans, published),
        _figure_7(plans, published),
        _figure_8(plans, published),
        _compile_time(plans),
        _collectives(plans),
        _better(plans),
    ]


def pages(plans: Mapping[str, dict], published: Mapping, command: str) -> dict[str, str]:
    """Write every table as Markdown, JSON and CSV: text by name of file."""
    found = all_tables(plans, published)
    as_json = json.dumps([dataclasses.asdict(table) for table in found], indent=1) + "\n"
    return {
        "tables.md": _markdown(found, plans, command),
        "tables.json": as_json,
        **{f"{table.name}.csv": _csv_text(table) for table in found},
    }


def _rows(plans: Mapping[str, dict], field: str) -> list[dict]:
    """List the plans whose row stands where a field of `rows.Row` says so."""
    return [plan for plan in plans.values() if plan["row"][field]]


def _table_1(plans: Mapping[str, dict], published: Mapping) -> Table:
    rows = []
    for plan in _rows(plans, "table_3"):
        paper = plan["row"]["paper"]
        printed = published["tables_1_and_3"][paper]
        derived = published["parameters"][paper]
        experts = printed.get("experts_total", 0)
        rows.append(
            (
                paper,
                *(_number(experts, "{:d}"), _number(plan["experts_total"], "{:d}")),
                printed.get("weights_printed", "-"),
                f"{derived / 1e9:.4g}B",
                f"{plan['params_total'] / 1e9:.4f}B",
                difference(plan["params_total"], derived),
                f"{plan['params_active'] / 1e9:.3f}B",
            )
        )
    heads = ("model", "experts, paper", "ours", "parameters, printed")
    heads = (*heads, "by the paper's sizes", "ours", "difference", "active")
    remark = (
        "The printed sizes are rounded, and nearer to units of 2^30 (619.4e9 = 577 x 2^30); the "
        "column beside them is arithmetic with the widths of appendix A.2. T(96L) has no experts."
    )
    return Table("table_1", "Table 1: experts and parameters", heads, rows, (remark,))


def _table_3(plans: Mapping[str, dict], published: Mapping) -> Table:
    rows, remarks = [], []
    for plan in _rows(plans, "table_3"):
        paper = plan["row"]["paper"]
        printed = published["tables_1_and_3"][paper]
        cells = [paper, str(plan["cores"]), printed.get("batch_tokens", "-")]
        for ours, theirs in (
            ("steps_per_second", "steps_per_s"),
            ("core_years", "core_years"),
            ("days", "days"),
        ):
            value = printed.get(theirs)
            cells += [_number(value), _number(plan[ours]), difference(plan[ours], value)]
        rows.append((*cells, _number(plan["mfu"], "{:.1%}"), _note(plan)))
        wanted, cores = printed.get("steps_per_s"), printed["cores"]
        if plan["step_seconds"] and wanted and cores == 128:
            remarks.append(_out_of_reach(plan, wanted))
    remarks += _half_the_tokens(plans, published)
    remarks.append(
        "T(96L): the paper trains it by pipelining (GPipe) and prints no steps/s; ours is split "
        "over rows and hidden widths."
    )
    heads = ("model", "cores", "batch", "steps/s, paper", "ours", "diff.", "core-years, paper")
    heads = (*heads, "ours", "diff.", "days, paper", "ours", "diff.", "MFU", "note")
    title = "Table 3: cost of training on 10^12 tokens"
    return Table("table_3", title, heads, rows, tuple(remarks))


def _note(plan: Mapping) -> str:
    if plan["fits"] is not False:
        return plan["row"]["note"]
    memory = plan["memory_bytes"]
    return f"does not fit: {memory['total'] / 2**30:.1f} GiB of {memory['limit'] / 2**30:.0f}"


def _out_of_reach(plan: Mapping, published: float) -> str:
    """Say what share of the peak the published rate would take."""
    flops = plan["flops_per_core"]
    once = flops["executed"] - flops["recomputed"]
    # tokens/s / (cores * peak) * ... : the peak that the model FLOPs utilisation refers to.
    peak = flops["useful"] / plan["mfu"] / plan["step_seconds"]
    again = f", and with recomputation {flops['executed'] * published / peak:.0%}"
    return (
        f"{plan['row']['paper']}: 1M tokens a batch are 8192 source tokens a core, and as many "
        f"target tokens. The products of a step are then {once / 1e12:.1f} TFLOP a core without "
        f"recomputation: the published {published} steps/s are {once * published / peak:.0%} of "
        f"the peak of {peak / 1e12:.1f} TFLOP/s{again if flops['recomputed'] else ''}. The paper's "
        "own layers reach 54 to 76 % of their rooflines (Figure 8)."
    )


def _half_the_tokens(plans: Mapping[str, dict], published: Mapping) -> list[str]:
    """Say what ours would take if the batch of the 128-core rows were source and target."""
    found = []
    for plan in _rows(plans, "table_3"):
        paper = plan["row"]["paper"]
        small = [
            other
            for other in plans.values()
            if other["row"]["paper"] == paper
            and other["row"]["tokens_per_core"] == 2048
            and not other["row"]["short"]
        ]
        if not small or not plan["step_seconds"]:
            continue
        # Linear between 2048 and 8192 tokens a core.
        few, many = small[0]["step_seconds"], plan["step_seconds"]
        half = few + (many - few) / 3
        rate = 1 / half
        known = published["tables_1_and_3"][paper]["steps_per_s"]
        found.append(
            f"{paper}: were those 1M tokens source and target together, 4096 of each a core, ours "
            f"would take {half:.2f} s a step: {rate:.2f} steps/s, {difference(rate, known)} from "
            f"the published {known}. But the days of Table 3 count 1M source tokens a step."
        )
    return found


def _figure_7(plans: Mapping[str, dict], published: Mapping) -> Table:
    rows, holes = [], 0.0
    by_paper = {plan["row"]["paper"]: plan for plan in _rows(plans, "figure_7")}
    for paper, bars in published["figure_7_gb"].items():
        plan = by_paper.get(paper)
        if plan is None or not plan["fits"]:
            continue
        memory = {key: size / 1e9 for key, size in plan["memory_bytes"].items() if size}
        weights = memory["parameters"] + memory["optimizer"]
        total = bars["weights"] + bars["activations"]
        holes = max(holes, memory["total"] / memory["peak"] - 1)
        spent = plan["breakdown_seconds"].values()
        share = sum(p.get("recompute", 0) for p in spent) / plan["step_seconds"]
        printed = published["figure_7_recompute_share"].get(paper)
        rows.append(
            (
                paper,
                *(f"{bars['weights']:.2f}", f"{weights:.2f}", difference(weights, bars["weights"])),
                *(f"{total:.2f}", f"{memory['peak']:.2f}", difference(memory["peak"], total)),
                f"{memory['peak'] - weights:.2f}",
                *(_number(printed, "{:.0%}"), f"{share:.0%}"),
            )
        )
    heads = ("model", "weights, paper", "ours", "diff.", "total, paper", "ours", "diff.")
    heads = (*heads, "gradients and activations", "recompute, paper", "ours")
    remarks = (
        "Weights are parameters and optimizer state; of MoE(2048E,60L) the moments of experts are "
        "split over the cores. Totals are what is alive at once; allocated is up to "
        f"{holes:.0%} more, for holes between buffers and for code.",
        "What ours have besides: all gradients are alive until the step is known to be finite, and "
        "the compiler rounds the weights of all layers to bfloat16 before its loops and keeps "
        "these copies, half the size of the layers' weights."
        + _gradients(by_paper.get("MoE(2048E,12L)"), published),
        "The 12 and 24 layers recompute norms, attention weights, dropout and the masks of "
        'dispatch (REMAT_POLICY = "products"), where the paper keeps everything.',
    )
    return Table("figure_7", "Figure 7: memory of a core, GB", heads, rows, remarks)


def _gradients(plan: Mapping | None, published: Mapping) -> str:
    """Say how gradients compare with what the paper's bar leaves for all but weights."""
    if plan is None:
        return ""
    paper, size = plan["row"]["paper"], plan["memory_bytes"]["gradients"] / 1e9
    left = published["figure_7_gb"][paper]["activations"]
    return (
        f" The gradients of {paper} take {size:.2f} GB, where the paper's total leaves {left:.2f} "
        "GB for gradients and activations."
    )


def _figure_8(plans: Mapping[str, dict], published: Mapping) -> Table:
    rows = []
    sums: dict[str, float] = {}
    for plan in sorted(_rows(plans, "figure_8"), key=lambda plan: plan["row"]["figure_8"]):
        experts = str(plan["row"]["figure_8"])
        ours = plan["encoder_forward_seconds"]
        total, total_published = 0.0, 0.0
        for bar, part in FIGURE_8.items():
            roofline, measured = published["figure_8_us"][experts][bar]
            mine = ours.get(part, 0.0) / ENCODER_PAIRS * 1e6
            total, total_published = total + mine, total_published + measured
            rows.append(
                (
                    f"{experts} experts",
                    part,
                    f"{roofline}",
                    f"{measured}",
                    f"{mine:.0f}",
                    difference(mine, measured),
                )
            )
        sums[experts] = total
        rows.append(
            (
                f"{experts} experts",
                "sum",
                "",
                f"{total_published:.0f}",
                f"{total:.0f}",
                difference(total, total_published),
            )
        )
    heads = ("size", "part", "roofline, paper", "measured, paper", "ours", "difference")
    remarks = [
        "The published bars are read off the figure to 65 microseconds: the cumsums of 128 and 512 "
        "experts are 66 and 328.",
        "Attention and projections are not apart in ours: the compiler computes one projection of "
        "each layer within the product with the queries, and dropout and softmax within the output "
        "projection. Attention misses by what grows with the length of a row, which the paper does "
        "not name: random numbers for dropout, and the sums of the float32 softmax."
        + _short(plans),
    ]
    if {"128", "2048"} <= sums.keys():
        remarks.append(
            f"Growth from 128 to 2048 experts: {sums['2048'] / sums['128']:.2f} times the time for "
            "16 times the parameters (published: 1.7)."
        )
    title = "Figure 8: forward pass of a dense and a sparse layer, microseconds"
    return Table("figure_8", title, heads, rows, tuple(remarks))


def _short(plans: Mapping[str, dict]) -> str:
    """Say what attention takes on rows of half the length."""
    same = [plan for plan in plans.values() if plan["row"]["short"] or plan["row"]["figure_8"]]
    by_length = {
        plan["row"]["short"]: plan["encoder_forward_seconds"]["attention"] / ENCODER_PAIRS * 1e6
        for plan in same
        if plan["cores"] == 128
    }
    if len(by_length) < 2:
        return ""
    return (
        f" On 128 cores it takes {by_length[False]:.0f} microseconds with rows of 256 tokens, and "
        f"{by_length[True]:.0f} with rows of 128, as many tokens a core."
    )


def _scaling(plans: Mapping[str, dict]) -> list[dict]:
    return sorted(_rows(plans, "scaling"), key=lambda plan: plan["cores"])


def _compile_time(plans: Mapping[str, dict]) -> Table:
    there = _scaling(plans)
    base = next((p for p in there if p["cores"] == 32), None)
    rows = [
        (
            str(plan["cores"]),
            f"{plan['compile_cpu_seconds']:.0f}",
            _number(base and plan["compile_cpu_seconds"] / base["compile_cpu_seconds"], "{:.2f}"),
            f"{plan['compile_seconds']:.0f}",
        )
        for plan in there
    ]
    heads = ("cores", "processor seconds", "times that of 32 cores", "wall clock seconds")
    remark = (
        "12 layers, one expert and 2048 tokens a core. Compiled one by one, with nothing else "
        "running; the processor time of the compiler is compared, of the quickest of three tries."
    )
    title = "Compile time against number of cores (the paper: constant)"
    return Table("compile_time", title, heads, rows, (remark,))


def _collectives(plans: Mapping[str, dict]) -> Table:
    rows = []
    for plan in _scaling(plans):
        sends = [c for c in plan["collectives"] if c["kind"] == "all-to-all"]
        mebibytes = sum(c["count"] * c["bytes"] for c in sends) / 2**20
        milliseconds = sum(c["seconds"] for c in sends) * 1e3
        rows.append(
            (
                str(plan["cores"]),
                str(sum(c["count"] for c in sends)),
                f"{mebibytes:.0f}",
                f"{milliseconds:.1f}",
                f"{8 * milliseconds / mebibytes:.2f}",
            )
        )
    heads = ("cores", "all-to-alls a step", "MiB a step, a core", "ms a step", "ms for 8 MiB")
    remark = (
        "A core's bytes stay; time grows about as the root of the number of cores (section 2.3). "
        "Where products are kept for the backward pass, the compiler sends forward in float32."
    )
    title = "All-to-all against number of cores"
    return Table("all_to_all", title, heads, rows, (remark,))


def _better(plans: Mapping[str, dict]) -> Table:
    rows = []
    for plan in sorted(_rows(plans, "beyond"), key=lambda plan: -plan["params_total"]):
        first = next(p for p in _rows(plans, "beyond") if p["row"]["paper"] == plan["row"]["paper"])
        cells = [plan["row"]["paper"], plan["row"]["beyond"], ", ".join(plan["row"]["bindings"])]
        memory, step = plan["memory_bytes"]["total"], plan["step_seconds"]
        cells += [f"{memory / 1e9:.2f}", difference(memory, first["memory_bytes"]["total"])]
        cells += [_number(step, "{:.3f}"), difference(step, first["step_seconds"])]
        rows.append((*cells, _number(plan["steps_per_second"], "{:.3f}")))
    heads = ("model", "what is on", "settings", "memory of a core, GB", "to the first row")
    heads = (*heads, "step, s", "to the first row", "steps/s")
    return Table("beyond", "What this project has beyond the paper", heads, rows)


def _csv_text(table: Table) -> str:
    """Write a table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.heads, *table.rows])
    return text.getvalue()


def _markdown(found: Sequence[Table], plans: Mapping[str, dict], command: str) -> str:
    """Write all tables as one page."""
    versions = next(iter(plans.values()))["versions"]
    lines = [
        "# The paper's cost tables, compiled",
        "",
        f"Made by `{command}` with " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".",
        "Nothing here was run on a TPU: sizes are the TPU compiler's, times are predictions.",
    ]
    for table in found:
        lines += ["", f"## {table.title}", ""]
        lines.append("| " + " | ".join(table.heads) + " |")
        lines.append("|" + "---|" * len(table.heads))
        lines += ["| " + " | ".join(row) + " |" for row in table.rows]
        for remark in table.remarks:
            lines += ["", remark]
    return "\n".join(lines) + "\n"

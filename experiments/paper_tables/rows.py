"""What is compiled: the rows of Tables 1 and 3, and what Figures 7 and 8 need besides."""

import dataclasses

RANDOM = "gin/tasks/random.gin"  # needs no data packages; the step is the same


@dataclasses.dataclass(frozen=True)
class Row:
    """One program.

    Attributes:
        name: of the program's files.
        paper: the paper's name of the model.
        gin_file: the experiment.
        topology: the machine, one expert a core as in the paper.
        tokens_per_core: source tokens; None: the gin file's, Table 3's batch.
        bindings: what differs from the gin file.
        note: why.
        table_3: it is a row of Tables 1 and 3, at their batch size.
        figure_7: it is a bar of Figure 7.
        figure_8: number of experts of its bars of Figure 8; 0 if it has none.
        short: its rows are half as long as those of the others, for attention's bar of Figure 8.
        scaling: it stands where the number of cores alone varies.
        beyond: it shows what this project has beyond the paper: what is on, in words.
    """

    name: str
    paper: str
    gin_file: str
    topology: str
    tokens_per_core: int | None = None
    bindings: tuple[str, ...] = ()
    note: str = ""
    table_3: bool = False
    figure_7: bool = False
    figure_8: int = 0
    short: bool = False
    scaling: bool = False
    beyond: str = ""


_MACHINES = {8: "v3:2x2", 32: "v3:4x4", 128: "v3:8x8", 512: "v3:16x16", 2048: "v3:32x32"}
_BF16 = 'ACTIVATION_DTYPE="bfloat16"'
_SCATTER = "DISPATCH=@dispatch.ScatterDispatch()"
# Adafactor averages the second moments of experts over the experts, and every core would hold whole
# what is left: it is split along the hidden width (ZeRO stage 1).
_SPLIT = 'rules.Rules.optimizer=(("expert_mlp", "expert"),)'


def _model(experts: int, layers: int, suffix: str = "", **how) -> Row:
    name = f"moe_{experts}e_{layers}l"
    gin_file = f"gin/paper/{name}.gin"
    paper = f"MoE({experts}E,{layers}L)"
    return Row(name + suffix, paper, gin_file, _MACHINES[experts], **how)


def _small(cores: int) -> Row:
    return Row(
        f"moe_{cores}e_12l",
        f"MoE({cores}E,12L)",
        "gin/paper/moe_128e_12l.gin",
        _MACHINES[cores],
        tokens_per_core=2048,
        bindings=(f"NUM_EXPERTS={cores}", f"NUM_EXPERT_PARTITIONS={cores}"),
        scaling=True,
    )


TABLE_3 = (
    _model(2048, 36, table_3=True, figure_7=True, figure_8=2048, beyond="as the paper"),
    _model(2048, 12, table_3=True, figure_7=True, scaling=True, beyond="products kept (the row)"),
    _model(512, 36, table_3=True, figure_8=512),
    _model(512, 12, table_3=True, figure_7=True, scaling=True),
    _model(128, 36, table_3=True),
    _model(128, 12, table_3=True),
)
SCALE = (
    _model(
        *(2048, 60),
        bindings=(_SPLIT,),
        table_3=True,
        figure_7=True,
        note="bfloat16 gradients, and moments of experts split over the cores: not in the paper",
    ),
    Row("dense_96l", "T(96L)", "gin/paper/dense_96l.gin", "v3:32x32", table_3=True),
)
# Figures 7 and 8 are at 2048 tokens a core, Table 3's 128-core runs at 8192.
FIGURES = (
    _model(128, 36, "_2048", tokens_per_core=2048, figure_8=128),
    _model(
        *(128, 36, "_short"),
        tokens_per_core=2048,
        bindings=('TASK_FEATURE_LENGTHS={"inputs": 128, "targets": 128}',),
        short=True,
    ),
    _model(128, 12, "_2048", tokens_per_core=2048, figure_7=True, scaling=True),
    Row(
        "moe_2048e_24l",
        "MoE(2048E,24L)",
        "gin/paper/moe_2048e_12l.gin",
        "v3:32x32",
        bindings=("NUM_ENCODER_LAYERS=12", "NUM_DECODER_LAYERS=12"),
        figure_7=True,
    ),
)
SMALL = (_small(32), _small(8))
# The same models with what this project has beyond the paper.
BETTER = (
    _model(2048, 36, "_bf16", bindings=(_BF16,), beyond="bfloat16 activations"),
    _model(2048, 36, "_scatter", bindings=(_SCATTER,), beyond="scatter dispatch"),
    _model(2048, 36, "_split", bindings=(_SPLIT,), beyond="moments of experts split (ZeRO-1)"),
    _model(
        *(2048, 36, "_all"),
        bindings=(_SPLIT, _BF16, _SCATTER, 'GRADIENT_DTYPE="bfloat16"'),
        beyond="all of these, and bfloat16 gradients",
    ),
    _model(2048, 12, "_none", bindings=('REMAT_POLICY="none"',), beyond="everything kept"),
    _model(2048, 12, "_full", bindings=('REMAT_POLICY="full"',), beyond="everything recomputed"),
)
ROWS = (*TABLE_3, *SCALE, *FIGURES, *SMALL, *BETTER)

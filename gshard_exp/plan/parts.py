"""Tells which part of the model an instruction belongs to, and in which pass, from its name.

JAX writes the path of modules and the einsum into `op_name`:
`jit(step)/transpose(jvp(Transformer))/Transformer.decode/decoder/while/body/checkpoint/
rematted_computation/layers/pattern_1/ffn/experts/ERM,EMH->ERH/dot_general`.
The parts are the bars of Figure 8, and what Figure 8 leaves out.
"""

import re
from collections.abc import Set

from gshard_exp.model.contract import moe_layers
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.sharding.causes import BACKWARD, FORWARD, OUTSIDE, RECOMPUTE, pass_of

PROJECTIONS = "projections"
ATTENTION = "attention"
DENSE_FFN = "dense FFN"
GATE_EINSUMS = "gate einsums"
GATE_CUMSUM = "gate cumsum"
DISPATCH_COMBINE = "dispatch and combine"
MOE_FFN = "MoE FFN"
EMBEDDINGS = "embeddings and softmax"
OPTIMIZER = "optimizer"
SAVED = "layers' slices"  # of stacked parameters and of activations kept for the backward pass
GRADIENT_SUM = "gradient sum"  # over the cores that hold the same parameter
REST = "norms, dropout, residuals"
PARTS = (
    PROJECTIONS,
    ATTENTION,
    DENSE_FFN,
    GATE_EINSUMS,
    GATE_CUMSUM,
    DISPATCH_COMBINE,
    MOE_FFN,
    EMBEDDINGS,
    REST,
    SAVED,
    GRADIENT_SUM,
    OPTIMIZER,
)

UPDATE = "update"
PHASES = (FORWARD, RECOMPUTE, BACKWARD, UPDATE)

_BLOCK = re.compile(r"/(encoder|decoder)/.*\bpattern_(\d+)/(\w+)")


def sparse_blocks(model: Seq2SeqModel) -> Set[str]:
    """Name the blocks with a sparse layer: `encoder/1` is the second of the encoder's pattern."""
    return {
        f"{stack}/{re.sub(r'[^0-9]', '', field.split('.')[0])}"
        for stack in ("encoder", "decoder")
        for field, _ in moe_layers(model, stack)
    }


def phase(op_name: str) -> str:
    """Return the pass; what lies outside of a gradient updates the parameters."""
    found = pass_of(op_name)
    return UPDATE if found == OUTSIDE else found


def part(op_name: str, sparse: Set[str], *, sums_gradients: bool = False) -> str:
    """Return one of `PARTS`.

    Args:
        op_name: of an instruction.
        sparse: see `sparse_blocks`.
        sums_gradients: the instruction adds up over cores that hold other rows of the batch; over
            those that split hidden widths or heads it is a sum within a product.
    """
    where = phase(op_name)
    block = _BLOCK.search(op_name)
    if sums_gradients and where == BACKWARD:
        return GRADIENT_SUM
    if block is None and re.search(r"/(encoder|decoder)/while(/|$)", op_name):
        return SAVED
    if block is None:
        return OPTIMIZER if where == UPDATE else EMBEDDINGS
    stack, index, layer = block.groups()
    inside = op_name[block.end() :]
    if layer in ("attention", "cross_attention"):
        projects = "._project" in inside or "BLND,NDM->BLM" in inside
        return PROJECTIONS if projects else ATTENTION
    if layer != "ffn":
        return REST
    return _sparse(inside) if f"{stack}/{index}" in sparse else DENSE_FFN


def _sparse(inside: str) -> str:
    # Scopes of `moe.experts`, and the method of the expert that all tokens share.
    if "/experts/" in inside or "._shared/" in inside:
        return MOE_FFN
    if re.search(r"/(dispatch|combine)/", inside):
        return DISPATCH_COMBINE
    if "_router" in inside or re.search(r"/GS[A-Z]+,GS?[A-Z]+->GS?[A-Z]+", inside):
        return GATE_EINSUMS
    # Rows moved by index instead of einsum.
    if re.search(r"/(scatter|gather|scatter-add)$", inside):
        return DISPATCH_COMBINE
    return GATE_CUMSUM

"""Glossary of axis letters, logical axis names and mesh axis names. Imports nothing of ours.

Axis letters (a local array of rank >= 2 in `moe/` and `model/` carries them as a suffix):

    B batch rows               L length of a row, tokens
    G routing groups           S tokens per group              (B * L == G * S, padding included)
    E experts                  C slots per (group, expert)     K choices per token
    M model width              H feed-forward hidden width
    R rows sorted by expert    t rows of a tile of them
    N attention heads          D width of one head             V vocabulary

Logical axes name what a dimension means; the rules table (gin, `sharding/rules.py`) says which
mesh axis, if any, a logical axis is split over. Model code writes only logical names.
"""

from typing import Final

# Mesh axes, in the order of the device array: neighbours in the last axis are closest.
DATA: Final = "data"
EXPERT_AXIS: Final = "expert"
MODEL: Final = "model"
MESH_AXES: Final = (DATA, EXPERT_AXIS, MODEL)

# Logical axes of parameters.
EMBED: Final = "embed"
MLP: Final = "mlp"
HEADS: Final = "heads"
KV: Final = "kv"
VOCAB: Final = "vocab"
EXPERT: Final = "expert"
EXPERT_MLP: Final = "expert_mlp"
ROUTER_EXPERT: Final = "router_expert"
LAYERS: Final = "layers"

# Logical axes of activations. Those that may be split otherwise than the parameter of the same
# width have a name of their own.
BATCH: Final = "batch"
LENGTH: Final = "length"
ACTIVATION_EMBED: Final = "activation_embed"
ACTIVATION_MLP: Final = "activation_mlp"
ACTIVATION_HEADS: Final = "activation_heads"
ACTIVATION_KV: Final = "activation_kv"
ACTIVATION_VOCAB: Final = "activation_vocab"
GROUP: Final = "group"  # routing groups, before dispatch and after combine
GROUP_TOKENS: Final = "group_tokens"  # S
EXPERT_GROUP: Final = "expert_group"  # routing groups seen by the experts, after dispatch
CAPACITY: Final = "capacity"  # C
IMAGE_ROWS: Final = "image_rows"  # places of an image, before it is made tokens
IMAGE_COLUMNS: Final = "image_columns"

PARAMETER_AXES: Final = (EMBED, MLP, HEADS, KV, VOCAB, EXPERT, EXPERT_MLP, ROUTER_EXPERT, LAYERS)
ACTIVATION_AXES: Final = (
    BATCH,
    LENGTH,
    ACTIVATION_EMBED,
    ACTIVATION_MLP,
    ACTIVATION_HEADS,
    ACTIVATION_KV,
    ACTIVATION_VOCAB,
    GROUP,
    GROUP_TOKENS,
    EXPERT_GROUP,
    CAPACITY,
    IMAGE_ROWS,
    IMAGE_COLUMNS,
)
LOGICAL_AXES: Final = PARAMETER_AXES + ACTIVATION_AXES

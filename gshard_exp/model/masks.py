"""Who may look at whom: from segment ids to masks."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def segments(segment_ids: Int[Array, "B L"] | None, tokens: Int[Array, "B L"]):
    """Return the segment ids; without any each row is one example, 0 on padding."""
    return (tokens > 0).astype(jnp.int32) if segment_ids is None else segment_ids


def same_segment(query: Int[Array, "B L"], key: Int[Array, "B K"]) -> Bool[Array, "B L K"]:
    """Let positions attend to those of their own example; none to padding."""
    return (query[:, :, None] == key[:, None, :]) & (key[:, None, :] > 0)


def causal_segment(segment_ids: Int[Array, "B L"]) -> Bool[Array, "B L L"]:
    """Let positions attend to themselves and those before them in their own example."""
    length = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((length, length), dtype=bool))
    return same_segment(segment_ids, segment_ids) & causal[None, :, :]


def of_rows(segment_ids: Int[Array, "B K"], length: int) -> Bool[Array, "B L K"]:
    """Let `length` positions attend to the whole row of a key, padding excepted."""
    rows, keys = segment_ids.shape
    return jnp.broadcast_to(segment_ids[:, None, :] > 0, (rows, length, keys))

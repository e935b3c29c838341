"""The audit of gatings on batches worked by hand, and on its own batches."""

import dataclasses

import jax
import numpy as np
import pytest

from gshard_exp.moe.audit import AuditBatch, Audited, audit, audit_batches
from gshard_exp.moe.gating import Top1Gating, Top2Gating

# As in test_routing_presets: experts 0 1, 0 2, 0 1, 0 2. Algorithm 1 at C=3 keeps
#   s0 -> 0 (2/3);  s1 -> 0 (5/9);  s2 -> 0 1 (7/9, 2/9);  s3 -> 2 (1/3)
GATES = ((0.6, 0.3, 0.1), (0.5, 0.1, 0.4), (0.7, 0.2, 0.1), (0.6, 0.1, 0.3))
COINS = np.array([0.7, 0.9, 0.1, 0.6], np.float32)
HAND = {
    "hand": AuditBatch(
        np.log(np.array([GATES], np.float32)), np.stack([COINS] * 3, axis=-1)[None, ...]
    )
}


@pytest.mark.parametrize(
    ("audited", "want"),
    [
        # C, routed differently, gained, lost, overflowed, left behind, weighed differently, E^2 aux
        (Audited(Top2Gating()), (3, 0, 0, 0, 1, 0, 0, 1.8)),
        # s0 and s1 gain their second choices; s2 and s3 are as in the paper.
        (Audited(Top2Gating(second_choice="all")), (3, 2, 2, 0, 1, 0, 0, 1.8)),
        # And s3, which has lost its first expert, has its second with weight 1 instead of 1/3.
        (
            Audited(Top2Gating(second_choice="all", normalize="after_drops")),
            (3, 2, 2, 0, 1, 0, 1, 1.8),
        ),
        # s0 and s1 keep expert 0; their weights are .6 and .5. s2 loses 1, s3 its only expert (C=2
        # for one choice: s2 loses 0 as well).
        (Audited(Top1Gating()), (2, 2, 0, 2, 2, 2, 2, 1.8)),
        # C=6, at most S=4: s3 gains expert 0.
        (Audited(Top2Gating(), 2.0), (4, 1, 1, 0, 0, 0, 0, 1.8)),
        # Without a capacity as well, and it has none to tell.
        (Audited(Top2Gating(), None), (None, 1, 1, 0, 0, 0, 0, 1.8)),
        # c = (4, 2, 2): 3 * (.6 + .5 * .175 + .5 * .225) = 2.4
        (Audited(Top2Gating(aux_counts="all")), (3, 0, 0, 0, 1, 0, 0, 2.4)),
        # s2 has weights .7 and .2 instead of 7/9 and 2/9, s3 .3 instead of 1/3.
        (Audited(Top2Gating(normalize="never", second_choice="all")), (3, 2, 2, 0, 1, 0, 2, 1.8)),
    ],
)
def test_rows_by_hand(audited, want):
    (row,) = audit({"it": audited}, HAND)
    assert (row.gating, row.batch, row.tokens) == ("it", "hand", 4)
    got = dataclasses.astuple(row)
    assert (got[2], *got[4:10]) == want[:7]
    np.testing.assert_allclose(row.auxiliary_loss, want[7], rtol=1e-5)


def test_on_its_own_batches_the_paper_agrees_with_itself_and_others_do_not():
    batches = audit_batches(0, groups=2, group_size=32, num_experts=4)
    gatings = {"paper": Audited(Top2Gating()), "all": Audited(Top2Gating(second_choice="all"))}
    rows = audit(gatings, batches)
    assert [(row.batch, row.gating) for row in rows] == [(b, g) for b in batches for g in gatings]
    for row in rows:
        assert row.tokens == 64 and row.capacity == 16
        if row.gating == "paper":
            assert not row.routed_differently and not row.weighed_differently
    by = {(row.batch, row.gating): row for row in rows}
    assert by["random", "all"].gained > 0
    # 32 first choices for 16 slots: at least 16 tokens a group have no first expert.
    assert by["crowded", "paper"].left_behind > by["random", "paper"].left_behind
    assert by["equal", "paper"].auxiliary_loss == pytest.approx(1.0)
    assert by["crowded", "paper"].auxiliary_loss > 3.9
    # Equal gates have 2 * g2 = 1, which is above every coin.
    assert by["equal", "all"].routed_differently == 0


def test_its_own_batches_are_what_their_names_say():
    batches = audit_batches(0, groups=4, group_size=64, num_experts=8)
    gates = {name: np.asarray(jax.nn.softmax(batch.logits)) for name, batch in batches.items()}

    def busiest(name):
        best = gates[name].argmax(-1)
        return max(np.bincount(best.ravel(), minlength=8)) / (best.size / 8)

    assert busiest("random") < 1.75 < 2 < busiest("skewed") < busiest("crowded") == 8
    second = {name: np.sort(of_batch, axis=-1)[..., -2] for name, of_batch in gates.items()}
    assert np.median(second["sure"]) < 0.05 < 0.15 < np.median(second["random"])
    np.testing.assert_allclose(gates["equal"], 1 / 8, rtol=1e-6)

"""Every region of an emulated launch against the reference, phase by phase.

Each phase's reference starts from what the kernel itself handed to it, so that what is left is one
phase's own difference: the order of fp32 sums, the last bits of rsqrt, exp2 and rcp, and what such
a bit does to a rounding. HALF_UNIT: a bf16 value may round the other way. SUM: fp32 sums of
products, of the largest value of the region.
"""

from __future__ import annotations

import torch

from mono_kernel import reference
from tests.mono_kernel.emulated import Group

HALF_UNIT, SUM = 2.0**-7, 2.0**-16
ATTENTION = 2.0**-10  # fp16 partials, see tests/ops/flydsl_decode.py
FLIPPED = 2e-3  # share of cache bytes that may differ: codes of a key whose norm differs by a bit
OPERANDS = ("normed", "attended", "post")
SAME_ON_ALL_RANKS = (
    "stream", "residual_out", "post", "post_factor", "logits", "chosen", "chosen_weights",
    "hidden_out",
)  # fmt: skip


def close(
    name: str, got: torch.Tensor, want: torch.Tensor, share: float, unit: float = 0.0, terms=0.0
):
    """|got - want| <= unit (|want| + terms) + share max |want|; no NaN. terms: magnitudes that were
    rounded before they were added."""
    got, want = got.float(), want.float()
    assert got.shape == want.shape, (name, got.shape, want.shape)
    assert not got.isnan().any(), f"{name}: NaN"
    limit = unit * (want.abs() + terms) + share * want.abs().max()
    worst = ((got - want).abs() - limit).max()
    assert worst <= 0, f"{name}: {float(worst)} above the tolerance"


def got_regions(group: Group, rank: int) -> reference.Regions:
    names = [
        "stream", "normed", "normed_factor", "projected", "q", "index_q", "scores", "selected",
        "attended", "attended_factor", "residual_out", "post", "post_factor", "logits", "active",
        "chosen", "chosen_weights", "hidden_out",
    ]  # fmt: skip
    return {name: group.region(name, rank) for name in names}


def check(group: Group) -> list[reference.Regions]:
    """Every region of every rank."""
    step, found = group.step, [got_regions(group, r) for r in range(len(group.ranks))]
    for name in SAME_ON_ALL_RANKS:
        for r in found[1:]:
            assert torch.equal(r[name].view(torch.uint8), found[0][name].view(torch.uint8)), name
    for rank, r in enumerate(found):
        _check_attention(group, rank, r)
    weights = step.weights
    total = reference.in_rank_order(
        [reference.output_part(w, r) for w, r in zip(weights, found, strict=True)]
    )
    want = reference.add(found[0]["stream"], total)
    close("residual_out", found[0]["residual_out"], want, SUM, HALF_UNIT, total.abs())
    for w, r in zip(weights, found, strict=True):
        _check_experts(w, r)
    total = reference.in_rank_order(
        [reference.down_part(w, r) for w, r in zip(weights, found, strict=True)]
    )
    close("hidden_out", found[0]["hidden_out"], total.to(torch.bfloat16), SUM, HALF_UNIT)
    return found


def _operand(r: reference.Regions, name: str) -> torch.Tensor:
    return reference.read_operand(r, name)


def _check_attention(group: Group, rank: int, r: reference.Regions) -> None:
    step, batch = group.step, group.step.batch
    w, caches = step.weights[rank], step.copies()[rank]
    want = reference.norm(w, step.hidden, step.residual)
    assert torch.equal(r["stream"], want["stream"])
    close("normed", _operand(r, "normed"), _operand(want, "normed"), 0.0, HALF_UNIT)
    want = reference.project(w, r)
    close("projected", r["projected"], want["projected"], SUM, HALF_UNIT)
    want = reference.insert(w, r, batch, caches)
    for name in ("q", "index_q"):
        close(name, r[name], want[name], SUM, HALF_UNIT)
    for ours, theirs in zip(group.ranks[rank].caches, caches, strict=True):
        written = (theirs.pages != _before(step, rank, theirs)).sum()
        assert (ours.pages != theirs.pages).sum() <= FLIPPED * written
    # From here on with the kernel's own caches.
    main, index = group.ranks[rank].caches
    rows = reference.rows_of(batch)
    live = torch.arange(r["scores"].shape[-1]) < rows.num_blocks[:, None] - w.shape.local_blocks
    scores = reference.score(r, batch, index)["scores"]
    largest = scores[:, live].abs().max() if live.any() else 0.0
    differ = (r["scores"] - scores).abs()[:, live]
    assert differ.numel() == 0 or differ.max() <= SUM * largest
    want = reference.attend(w.shape, r, batch, main)
    assert torch.equal(r["selected"], want["selected"])
    wanted = reference.join(w, want)
    close("attended", _operand(r, "attended"), _operand(wanted, "attended"), ATTENTION, HALF_UNIT)


def _before(step, rank: int, cache) -> torch.Tensor:
    return step.caches[rank][0 if cache.page.sides == ("k", "v") else 1].pages


def _check_experts(w, r: reference.Regions) -> None:
    want = reference.route(w, r)
    close("post", _operand(r, "post"), _operand(want, "post"), 0.0, HALF_UNIT)
    # The kernel norms a row in each task of the phase, with the same bits: `post` holds them.
    x = reference.value(r["post"], r["post_factor"]).double()
    close("logits", r["logits"], (x @ w.vectors["router"].double().T).float(), SUM)
    chosen, weights = reference.choose(w.shape, r["logits"], w.vectors["bias"])
    assert torch.equal(r["chosen"], chosen)
    close("chosen_weights", r["chosen_weights"], weights, 1e-6, 1e-5)
    s = w.shape
    want = reference.up(w, r)["active"]
    for slot in range(s.slots):
        width = s.shared if slot == s.chosen else s.intermediate
        got, wanted = (reference.value(x[:, slot, :, :width]) for x in (r["active"], want))
        close("active", got, wanted, SUM, HALF_UNIT)

"""How a launch of sparse_decode in Triton is cut."""

import pytest

from rocm_msa.ops.sparse_decode.plan import select


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("hopper", "cuda"),
        *((kind, t) for kind in ("nvfp4", "fp8", "bf16") for t in ("cuda", "gfx950")),
    ],
)
@pytest.mark.parametrize("topk", [1, 2, 5, 16, 32])
def test_every_plan_cuts_the_same_tree(kind, target, topk):
    """Units are powers of two below the list, so that each launch joins aligned slots."""
    seen = set()
    for rows in (1, 8, 64, 128, 256, 512, 4096):
        t = select(rows, 1, topk, kind, True, target)
        seen.add(t.unit)
        assert t.unit & (t.unit - 1) == 0 and 1 <= t.unit <= max(1, topk // 2)
        assert kind == "hopper" or t.unit <= 2
        assert not select(rows, 1, topk, kind, False, target).share
        assert not t.share or topk > 1
    assert kind != "hopper" or topk != 16 or seen == {1, 2, 4}

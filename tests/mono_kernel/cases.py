"""Small layers for the tests of the mono kernel: M3's structure, hidden 512, 8 experts."""

from __future__ import annotations

from mono_kernel.shapes import Formats, Shape

HIDDEN, Q_HEADS, KV_HEADS, EXPERTS, CHOSEN, INTERMEDIATE = 512, 8, 4, 8, 4, 512


def small_shape(tp: int = 1, formats: Formats = Formats(), **changes) -> Shape:  # noqa: B008
    """A rank's share of the small layer."""
    kv_heads = max(1, KV_HEADS // tp)
    values = {
        "tp": tp,
        "hidden": HIDDEN,
        "q_heads": Q_HEADS // tp,
        "kv_heads": kv_heads,
        "index_heads": kv_heads,
        "kv_replicas": max(1, tp // KV_HEADS),
        "rotary_dim": 64,
        "experts": EXPERTS,
        "chosen": CHOSEN,
        "intermediate": INTERMEDIATE // tp,
        "shared": INTERMEDIATE // tp,
        "topk": 16,
        "init_blocks": 0,
        "local_blocks": 1,
        "attention_format": formats.attention,
        "routed_format": formats.routed,
        "shared_format": formats.shared,
        "eps": 1e-6,
        "routed_scale": 2.0,
        "alpha": 1.702,
        "beta": 1.0,
        "limit": 7.0,
    }
    return Shape(**(values | changes))

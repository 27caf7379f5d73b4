"""Regions of scratch as tensors, for tests and for whoever inspects a step."""

from __future__ import annotations

import torch

from mono_kernel import plan
from mono_kernel.shapes import HEAD_DIM, MAX_ROWS, Shape

_E4M3, _BF16, _FP32, _INT32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32


def view(shape: Shape, scratch: torch.Tensor, name: str, max_blocks: int = 1) -> torch.Tensor:
    """A region in the dtype and shape of plan.scratch_layout, all 16 rows.

    scratch: uint8, the whole buffer. max_blocks: of the batch, for `scores`.
    """
    s, rows = shape, MAX_ROWS
    terms = s.attention_format != "bf16"
    wide = {"normed": s.hidden, "attended": s.attended, "post": s.hidden}
    kinds = {
        "stream": (_BF16, (rows, s.hidden)),
        "projected": (_BF16, (rows, s.features)),
        "q": (_BF16, (rows, s.q_heads, HEAD_DIM)),
        "index_q": (_BF16, (rows, s.index_heads, HEAD_DIM)),
        "scores": (_FP32, (s.index_heads, rows, max_blocks)),
        "selected": (_INT32, (s.kv_heads, rows, s.topk)),
        "logits": (_FP32, (rows, s.experts)),
        "active": (_E4M3, (rows, s.slots, 2, s.widest)),
        "chosen": (_INT32, (rows, s.chosen)),
        "chosen_weights": (_FP32, (rows, s.chosen)),
    }
    for operand, size in wide.items():
        split = operand == "post" or terms
        kinds[operand] = (_E4M3, (rows, 2, size)) if split else (_BF16, (rows, size))
        kinds[f"{operand}_factor"] = (_FP32, (rows,))
    dtype, size = kinds[name]
    where = plan.scratch_layout(shape, max_blocks)[name]
    return scratch[where.offset : where.end].view(dtype).view(size)

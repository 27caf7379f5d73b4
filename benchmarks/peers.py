"""Peers to compare with: vLLM 0.33's Triton kernels for MiniMax-M3, and convert-then-attend.

vLLM's two kernel files are run as they are from unpacked sources (tools/fetch_vllm_sources.py).
They need four names of vLLM, which stand-ins give here, so that nothing else of it is imported.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import torch
import triton
import triton.language as tl

from rocm_msa.ops.triton_common import page_halves

SOURCES = Path(__file__).resolve().parents[1] / ".cache" / "vllm-0.33.0"
_OPS = Path("vllm/models/minimax_m3/common/ops")


def load(name: str) -> types.ModuleType | None:
    """vLLM's `sparse_attn` or `index_topk`; None when the sources are not there."""
    path = SOURCES / _OPS / f"{name}.py"
    if not path.exists():
        return None
    platform = types.SimpleNamespace(
        is_arch_support_pdl=lambda: torch.cuda.get_device_capability()[0] >= 9,
        is_cuda=lambda: torch.version.hip is None,
        is_device_capability=lambda c: torch.cuda.get_device_capability() == c,
    )
    stand_ins = {
        "vllm": {},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils": {},
        "vllm.utils.math_utils": {"round_up": lambda x, y: (x + y - 1) // y * y},
    }
    for module, names in stand_ins.items():
        made = types.ModuleType(module)
        made.__dict__.update(names)
        sys.modules.setdefault(module, made)
    spec = importlib.util.spec_from_file_location(f"vllm_m3_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@triton.jit
def dequantize_kernel(
    pages,  # uint8, NVFP4 main pages of one head
    block_stride,
    block_ids,  # int32 [rows, topk]
    table,  # int32 [requests, max_blocks]
    table_row,
    rows_per_request,
    topk,
    out,  # e4m3 [rows * topk, 128 tokens, 2 * D]: K, then V
    K_SCALES: tl.constexpr,
    V_DATA: tl.constexpr,
    V_SCALES: tl.constexpr,
    D: tl.constexpr,
):
    """One selected block of one row: NVFP4 -> E4M3, the page that an FP8 kernel would read."""
    item = tl.program_id(0)
    row = item // topk
    block = tl.load(block_ids + item)
    if block < 0:
        return
    page = tl.load(table + (row // rows_per_request) * table_row + block).to(tl.int64)
    base = pages + page * block_stride
    token = tl.arange(0, 128)
    i = tl.arange(0, D)
    to = out + item.to(tl.int64) * (256 * D) + token[:, None] * (2 * D) + i[None, :]
    a, b = page_halves(base, token, 0, K_SCALES, D, 0, tl.float32)
    tl.store(to, tl.reshape(tl.join(a, b), (128, D)).to(tl.float8e4nv))
    a, b = page_halves(base, token, V_DATA, V_SCALES, D, 0, tl.float32)
    tl.store(to + D, tl.reshape(tl.join(a, b), (128, D)).to(tl.float8e4nv))


def dequantize_blocks(cache, block_ids, table, rows_per_request, out) -> None:
    """Selected blocks of a one-head NVFP4 main cache as FP8 pages `[rows * topk, 1, 128, 2 D]`."""
    layout = cache.page.head_layout
    rows, topk = block_ids.shape[1:]
    dequantize_kernel[(rows * topk,)](
        cache.pages, cache.block_stride, block_ids, table, table.stride(0), rows_per_request, topk,
        out, K_SCALES=layout["k_scales"].offset, V_DATA=layout["v_data"].offset,
        V_SCALES=layout["v_scales"].offset, D=cache.head_dim, num_warps=8,
    )  # fmt: skip

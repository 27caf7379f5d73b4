"""sparse_decode in Triton: split over the slots of a row's list, shared pages worked on once.

Launches: the plan of shared pages (sharing.py, only where plan.py asks for it), the rows one by one
(hopper.py for NVFP4 pages on sm_90, else portable.py), the tiles of rows that share pages
(hopper_shared.py, portable.py), and the rest of the tree of joins (merge.py). On sm_90 each but the
first is launched before the one ahead of it has ended and waits where it must.

Blocks are added in ascending order. A row's result depends on its query, list and pages alone: not
on the batch, on how the launch is split, or on which rows share its pages. Ids outside of the
causal blocks, and table entries that name no page of the cache, count as nothing (the reference
raises for the latter). Rows without a key give zeros and lse = -inf.
"""

from __future__ import annotations

import torch
import triton

from rocm_msa.cache.paged import MainCache
from rocm_msa.ops.sparse_decode import portable
from rocm_msa.ops.sparse_decode.merge import merge_kernel
from rocm_msa.ops.sparse_decode.plan import Tuning, select
from rocm_msa.ops.sparse_decode.sharing import Sharing, plan
from rocm_msa.ops.triton_host import (
    Geometry,
    aligned,
    converts_e4m3,
    hopper,
    operand_types,
    scale,
    target_of,
)

LOG2E = 1.4426950408889634
_SAME_SUMS = 32
"""Lines of a tile up to which the portable kernel adds as it does for a single row."""


def run(
    q,
    main_cache,
    block_ids,
    block_table,
    seq_lens,
    rows_per_request,
    sm_scale,
    out=None,
    shared_pages: bool = False,
    tuning: Tuning | None = None,
    fast: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out in q's dtype, lse); see api.py. `tuning` and `fast` are for tests and benchmarks.

    shared_pages: whether requests may have pages in common.
    fast: whether the Hopper kernels may be taken where they apply.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    rows, q_heads, dim = q.shape
    cache, topk = main_cache, block_ids.shape[-1]
    lse = torch.empty(rows, q_heads, dtype=torch.float32, device=q.device)
    if rows == 0 or q_heads == 0:
        return out, lse
    g = Geometry.of(cache)
    if topk == 0 or block_table.numel() == 0 or cache.num_blocks == 0:
        out.zero_()
        return out, lse.fill_(float("-inf"))
    hop = fast and _on_hopper(q, cache, g, topk)
    kind = "hopper" if hop else cache.dtype.value
    t = tuning or select(rows, cache.kv_heads, topk, kind, shared_pages, target_of(q))
    group = q_heads // cache.kv_heads
    units = triton.cdiv(topk, t.unit)
    programs = rows * cache.kv_heads * units
    pad = 16 if hop else max(16, triton.next_power_of_2(group))
    part = torch.empty(programs, pad, dim, dtype=torch.float32, device=q.device)
    part_ml = torch.empty(2, programs, pad, dtype=torch.float32, device=q.device)
    sharing = None
    if t.share and units > 1 and (hop or t.tile_rows * pad <= _SAME_SUMS):
        arguments = (block_ids, block_table, seq_lens, rows_per_request, cache.num_blocks)
        sharing = plan(*arguments, t.unit, t.tile_rows, hop)
    qk_scale = float(sm_scale) * LOG2E * scale(cache, "k")
    lists = (block_ids, *block_ids.stride(), block_table, *block_table.stride(), seq_lens)
    lists += (rows_per_request, topk)
    constants = {
        "KV_HEADS": cache.kv_heads,
        "GROUP": group,
        "HEAD_BYTES": g.head_bytes,
        "K_SCALES": g.k_scales,
        "V_DATA": g.v_data,
        "V_SCALES": g.v_scales,
        "UNIT": t.unit,
    }
    launch = _hopper if hop else _portable
    launch(q, cache, g, lists, qk_scale, part, part_ml, units, sharing, t, constants)
    units_pad = triton.next_power_of_2(units)
    merge_kernel[(rows, q_heads)](
        part, part_ml, out, *out.stride(), lse, units, programs,
        scale(cache, "v") * (16384.0 if hop else 1.0), 12.0 if hop else 0.0, q_heads,
        GROUP=group, GROUP_PAD=pad, UNITS_PAD=units_pad, LEVELS=units_pad.bit_length() - 1, D=dim,
        ORDER=3 if hop else g.kind, num_warps=1, **({"launch_pdl": True} if hop else {}),
    )  # fmt: skip
    return out, lse


def _on_hopper(q: torch.Tensor, cache: MainCache, g: Geometry, topk: int) -> bool:
    return (
        hopper(q)
        and g.kind == 0
        and g.head_dim == 128
        and q.shape[1] // cache.kv_heads <= 16
        and q.dtype is not torch.float32
        and q.stride(-1) == 1
        and aligned(cache)
        and topk <= 32
    )


def _hopper(q, cache, g, lists, qk_scale, part, part_ml, units, sharing, t, constants) -> None:
    from rocm_msa.ops.sparse_decode import hopper as own
    from rocm_msa.ops.sparse_decode import hopper_shared as tiles

    levels = max(1, t.unit.bit_length() - 1)
    programs = part.shape[0]
    own.attend_kernel[(programs,)](
        q, q.stride(0), q.stride(1), cache.pages, cache.block_stride, cache.num_blocks, *lists,
        qk_scale, part, part_ml, units, part_ml if sharing is None else sharing.taken,
        SLOTS=16 if lists[-1] <= 16 else 32, LEVELS=levels, SHARING=sharing is not None,
        num_warps=1,
        launch_pdl=sharing is not None, **constants,
    )  # fmt: skip
    if sharing is not None:
        tiles.shared_kernel[(programs,)](
            q, q.stride(0), q.stride(1), cache.pages, cache.block_stride, qk_scale, part, part_ml,
            units, *_lists(sharing),
            SLOTS=sharing.slots, LEVELS=levels, R=t.tile_rows, num_warps=t.tile_rows,
            launch_pdl=True, **constants,
        )  # fmt: skip


def _portable(q, cache, g, lists, qk_scale, part, part_ml, units, sharing, t, constants) -> None:
    qk, pv = operand_types(q, cache)
    programs, pad = part.shape[:2]
    slots = max(t.unit, triton.next_power_of_2(lists[-1]))
    assert t.unit <= 2, "portable.py joins in the order of the tree up to two slots"
    kind = g.kind + 2 if g.kind and converts_e4m3(q) else g.kind
    constants = {
        **constants, "GROUP_PAD": pad, "K_DATA": g.k_data, "D": g.head_dim, "KIND": kind,
        "QK": qk, "PV": pv, "TILE": t.tile, "STAGES": t.stages,
        "SLOTS": slots,
        # A product that is fused in one cut of the tree and stored in another has other bits.
        "enable_fp_fusion": False,
    }  # fmt: skip
    if torch.version.hip is not None:  # the same matrix instruction for one row and for a tile
        constants["matrix_instr_nonkdim"] = 16
    portable.attend_kernel[(programs,)](
        q, *q.stride(), cache.pages, cache.block_stride, cache.num_blocks, *lists, qk_scale,
        part, part_ml, units, part_ml if sharing is None else sharing.taken,
        SHARING=sharing is not None, num_warps=t.warps, **constants,
    )  # fmt: skip
    if sharing is not None:
        portable.shared_kernel[(programs,)](
            q, *q.stride(), cache.pages, cache.block_stride, qk_scale, part, part_ml, units,
            *_lists(sharing), R=t.tile_rows, num_warps=t.warps, **constants,
        )  # fmt: skip


def _lists(s: Sharing) -> tuple[torch.Tensor, ...]:
    return s.tile_rows, s.slot_keys, s.leading, s.work

"""The exchange in Triton, on NVIDIA and AMD: one launch a layer and rank; README.md: the protocol.

The same messages, memory and faults as on gfx950 (exchange_gfx950.py). The scores are those of the
op index_score_decode in Triton, bit for bit: the same products, added in the same order, as by the
kernel that the op takes on this GPU for these caches: portable.py, or hopper.py for NVFP4 on sm_90.

All programs of a launch must be resident, since they wait for one another and for other ranks: see
`programs`. Refused: fp32 queries, fp16 queries on a bf16 cache, a strided head_dim, head_dim not a
power of two >= 32, more than MAX_REQUESTS requests.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from dcp.exchange_triton_kernel import exchange_kernel
from dcp.mailbox_layout import MAX_WORKGROUPS, WORD, Geometry, launch_digest
from dcp.plan import Batch, Results, choose_results
from dcp.shard import Shard
from dcp.triton_scan import HOPPER
from rocm_msa.arch import GFX950
from rocm_msa.cache.paged import IndexCache
from rocm_msa.errors import check_int, expect
from rocm_msa.ops.index_score_decode.triton_impl import on_hopper
from rocm_msa.ops.triton_host import Geometry as PageGeometry
from rocm_msa.ops.triton_host import aligned, converts_e4m3, operand_types, scale

MAX_REQUESTS = 1024
# Programs of one warp that a unit holds: a SIMD each on AMD, whatever their registers; 255 * 32 of
# 65,536 on NVIDIA. What they take of LDS or shared memory is for a test to compare.
PROGRAMS_A_UNIT = {"hip": 4, "cuda": 7}
HOPPER_PROGRAMS, HOPPER_REGISTERS = 11, 184  # of KIND HOPPER: the compiler is held to them
TICKS_A_MS = {"hip": 100_000, "cuda": 1_000_000}
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def platform() -> str:
    """Of torch's build: "hip" or "cuda"."""
    return "cuda" if torch.version.hip is None else "hip"


def query_words(head_dim: int) -> int:
    """Words of a query of 16-bit values, for mailbox_layout.Geometry."""
    return head_dim // 2


def programs(device: torch.device, kind: int | None = None) -> int:
    """Programs that are resident together on a GPU that runs nothing else; None: of any kind."""
    units = GFX950.compute_units
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
    a_unit = HOPPER_PROGRAMS if kind == HOPPER else PROGRAMS_A_UNIT[platform()]
    return min(MAX_WORKGROUPS, units * a_unit)


def _kind(index_q: torch.Tensor, cache: IndexCache, page: PageGeometry) -> int:
    """How keys are read and summed: as index_score_decode does it here."""
    if on_hopper(index_q, cache, page):
        return HOPPER
    fast = converts_e4m3(index_q) and aligned(cache)
    return page.kind + 2 if page.kind and fast else page.kind


def check_batch(
    geometry: Geometry, shard: Shard, index_q, index_cache: IndexCache, batch: Batch, topk: int,
    results: Results,
) -> None:  # fmt: skip
    """Refuse what the kernel or the memory is not made for.

    Raises:
        NotImplementedError: see above.
        ValueError: what does not fit into the geometry, with its name.
    """
    if index_q.dtype not in _TYPES:
        raise NotImplementedError(expect("index_q.dtype", "bf16 or fp16", index_q.dtype))
    if operand_types(index_q, index_cache)[0] is tl.float32:
        got = f"{index_q.dtype} on a {index_cache.dtype.value} cache"
        raise NotImplementedError(expect("index_q.dtype", "bf16", got))
    if batch.requests > MAX_REQUESTS:
        raise NotImplementedError(expect("requests", f"<= {MAX_REQUESTS}", batch.requests))
    strides = index_q.stride()
    if strides[2] != 1 or strides[0] % 2 or strides[1] % 2 or index_q.data_ptr() % 4:
        wanted = "[even, even, 1] on a multiple of 4 bytes"
        raise ValueError(expect("index_q.stride()", wanted, strides))
    slots = shard.slots(batch.max_blocks)
    words = query_words(index_q.shape[2])
    for name, good, wanted in (
        ("ranks", geometry.ranks == shard.ranks, shard.ranks),
        ("heads", geometry.heads == shard.heads, shard.heads),
        ("topk", geometry.topk == topk, topk),
        ("query_words", geometry.query_words == words, words),
        ("rows", geometry.rows >= batch.rows, f">= {batch.rows}"),
        ("slots", geometry.slots >= slots, f">= {slots}"),
        ("result_words", results is Results.CANDIDATES or geometry.result_words >= slots,
         f">= {slots}"),
    ):  # fmt: skip
        if not good:
            raise ValueError(expect(f"geometry.{name}", wanted, getattr(geometry, name)))


def run(
    shard: Shard,
    geometry: Geometry,
    memory: tuple[torch.Tensor, torch.Tensor],
    index_q: torch.Tensor,
    index_cache: IndexCache,
    block_table: torch.Tensor,
    num_blocks: torch.Tensor,
    batch: Batch,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: torch.Tensor,
    *,
    layer: int = 0,
    results: Results | None = None,
    patience_ms: int = 5000,
    grid: int | None = None,
    times: torch.Tensor | None = None,
    launch: bool = True,
) -> torch.Tensor:
    """Queue one launch of this rank: no allocation, no wait.

    Args:
        memory: int64 `[ranks + 1]`, addresses of all ranks' mailboxes and of the 8 bytes where the
            host finds the error word; and the state, uint8 `[Geometry.state.nbytes]`.
        index_q: `[rows, own heads, head_dim]`; only the pusher's is sent.
        num_blocks: int32 `[rows]`, contiguous.
        out: int32 `[own heads, rows, topk]`.
        layer: names the launch: ranks at different layers find each other out.
        patience_ms: the shortest bound of a wait; the longest is four times that.
        grid: programs, by default all that are resident; fewer where ranks share a GPU.
        times: int64 `[len(PHASES) + 1]` for ticks of the first program: when it began, and the end
            of each phase.
        launch: False compiles and loads alone.
    """
    results = results or choose_results(shard, batch.max_blocks, topk)
    check_batch(geometry, shard, index_q, index_cache, batch, topk, results)
    page = PageGeometry.of(index_cache)
    kind = _kind(index_q, index_cache, page)
    most = programs(index_q.device, kind)
    grid = most if grid is None else grid
    check_int("grid", grid, 1)
    if grid > most:
        raise ValueError(expect("grid", f"<= {most} resident programs", grid))
    addresses, state = memory
    held = {"maxnreg": HOPPER_REGISTERS} if kind == HOPPER else {}
    q = index_q.view(torch.int32)
    state_at = {name: geometry.state[name].offset // WORD for name in
                ("error", "arrivals", "flags", "keys")}  # fmt: skip
    buffer_at = {name: geometry.buffer[name].offset // WORD for name in
                 ("hello", "queries", "results")}  # fmt: skip
    call = exchange_kernel[(grid,)] if launch else partial(exchange_kernel.warmup, grid=(grid,))
    made = call(
        q, q.stride(0), q.stride(1), index_cache.pages, index_cache.block_stride,
        index_cache.num_blocks, scale(index_cache, "k"), block_table, *block_table.stride(),
        num_blocks, batch.requests, batch.rows_per_request, batch.max_blocks, init_blocks,
        local_blocks,
        launch_digest(batch, shard, topk, init_blocks, local_blocks, layer, results),
        addresses, shard.rank, state.view(torch.int64), patience_ms * TICKS_A_MS[platform()],
        geometry.rows, geometry.slots, geometry.result_words, geometry.buffer.nbytes // WORD,
        buffer_at["results"], geometry.scrub_chunks - 1, out, *out.stride(), times,
        RANKS=shard.ranks, HEADS=shard.heads, TOPK=topk, SCORES=results is Results.SCORES,
        BUFFERS_AT=geometry.mailbox["buffer0"].offset // WORD, HELLO_AT=buffer_at["hello"],
        QUERIES_AT=buffer_at["queries"], ERROR_AT=state_at["error"],
        ARRIVALS_AT=state_at["arrivals"], FLAGS_AT=state_at["flags"], KEYS_AT=state_at["keys"],
        R=triton.next_power_of_2(shard.ranks), K=max(2, triton.next_power_of_2(topk)),
        REQUESTS=max(16, triton.next_power_of_2(batch.requests)),
        D=index_q.shape[2], K_SCALES=page.k_scales, KIND=kind, Q=_TYPES[index_q.dtype],
        QK=_TYPES[index_q.dtype] if kind == HOPPER else operand_types(index_q, index_cache)[0],
        AMD=platform() == "hip", num_warps=1, num_stages=1, **held,
    )  # fmt: skip
    if not launch:
        # Asking for its launcher loads the kernel: not to be done first while a graph is captured,
        # or while a kernel on this GPU waits for this rank.
        getattr(made, "run", None)
    return out

"""Who does what in a launch: phases, tasks, work lists, scratch regions. Integers only.

The grid is persistent: `workgroups` workgroups, one a compute unit. In each phase workgroup w takes
the tasks w, w + workgroups, ... The grid meets between phases (README.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mono_kernel.shapes import (
    CHUNK,
    GROUP,
    HEAD_DIM,
    MAX_CHOSEN,
    MAX_EXPERTS,
    MAX_ROWS,
    TILE,
    Shape,
)
from rocm_msa.arch import GFX950
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.errors import check_int, expect
from rocm_msa.layout import Layout, pack

WAVES = 4  # of a workgroup
LANES = WAVES * GFX950.wave_size
TOKENS_A_WAVE = 4  # of the insertion: rows of one head
SLOTS_A_TASK = WAVES  # of the attention: a page a wave
REGION_ALIGN = 128
WORD_BYTES = 8  # of the all-reduce: an fp32 value and a tag
SITES = ("output", "down")  # phases that end in an all-reduce
EXCHANGED = ("queries", "results")  # of the index exchange, in phases score and attend
QUERY_WORDS = HEAD_DIM // 2  # of a row and index head: two bf16 values each
SCRUB_WORDS = 1024  # of the results that a launch clears
MAX_WORKGROUPS = 256
PARTIAL_BYTES = 2 * GROUP * HEAD_DIM  # fp16, of a page and row: ops/flydsl_partial.py
TABLE_BYTES = 2048
V_BYTES = 19456  # of a page in LDS, see rocm_msa/ops/flydsl_page.py
LISTS_BYTES = 1024  # of the selection: a list of keys and of ids a wave, then ids a wave
AHEAD_EXPERTS = 8  # most experts whose next tiles are asked for ahead
PEER_SECONDS = 1.5e-6  # of a wait for a word of a peer: assumed, see the benchmark
NEVER = 1 << 31  # more blocks than any request has
FEW = 2  # rows, or (row, KV head) pairs, up to which every workgroup makes operands for itself

INPUTS = ("hidden", "residual", "weights", "main_cache", "index_cache", "batch")
OUTPUTS = ("hidden_out", "residual_out")


@dataclass(frozen=True)
class Phase:
    """A step of the layer. count: tasks of a batch of `rows`; None where it depends on the data.
    reads, writes: regions of scratch, INPUTS, OUTPUTS, and caches."""

    name: str
    count: Callable[[Shape, int], int] | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def _tiles(size: int) -> int:
    return size // TILE


PHASES = (
    Phase(
        "norm",
        lambda s, rows: rows,
        ("hidden", "residual", "weights"),
        ("stream", "normed", "normed_factor"),
    ),
    Phase(
        "project",
        lambda s, rows: _tiles(s.features),
        ("normed", "normed_factor", "weights"),
        ("projected",),
    ),
    Phase(
        "insert",
        lambda s, rows: -(-rows // TOKENS_A_WAVE) * -(-s.heads // WAVES),
        ("projected", "weights", "batch"),
        ("q", "index_q", "main_cache", "index_cache"),
    ),
    # From `projected`, not from `index_q`: for requests of one row no meeting lies between.
    Phase(
        "score",
        None,
        ("projected", "weights", "index_cache", "batch"),
        ("scores", "own_q", "all_q"),
    ),
    Phase(
        "attend",
        lambda s, rows: s.kv_heads * rows * (s.topk // SLOTS_A_TASK),
        ("q", "scores", "main_cache", "batch"),
        ("selected", "part_x", "part_o"),
    ),
    Phase(
        "join",
        lambda s, rows: rows,
        ("part_x", "part_o"),
        ("attended", "attended_factor"),
    ),
    Phase(
        "output",
        lambda s, rows: _tiles(s.hidden),
        ("attended", "attended_factor", "stream", "weights"),
        ("residual_out",),
    ),
    Phase(
        "route",
        lambda s, rows: rows + s.experts,
        ("residual_out", "weights"),
        ("post", "post_factor", "logits"),
    ),
    Phase(
        "up",
        None,
        ("post", "post_factor", "logits", "weights"),
        ("active", "chosen", "chosen_weights"),
    ),
    Phase("down", lambda s, rows: _tiles(s.hidden), ("active", "weights"), ("hidden_out",)),
)
HAND_OFFS = len(PHASES) - 1
PHASE_NAMES = tuple(phase.name for phase in PHASES)


def in_place(shape: Shape, rows, most_rows) -> dict:
    """phase -> whether no meeting of the grid follows it; ints, or values of a kernel.

    norm, join: every workgroup of the next phase does it for itself, in LDS. insert: a request's
    only new key lies in its newest block, which is kept without a score.
    """
    return {
        "norm": rows <= FEW,
        "join": rows * shape.kv_heads <= FEW,
        "insert": most_rows == 1,
    }


def share(count: int, workgroup: int, workgroups: int) -> range:
    """Tasks of one workgroup."""
    return range(workgroup, count, workgroups)


def grid(compute_units: int = GFX950.compute_units) -> int:
    """Workgroups of a launch: one a compute unit."""
    check_int("compute_units", compute_units, 1)
    return min(compute_units, MAX_WORKGROUPS)


def check_workgroups(workgroups: int, resident: int) -> None:
    """Refuse a grid that would wait for itself."""
    check_int("workgroups", workgroups, 1)
    limit = min(resident, MAX_WORKGROUPS)
    if workgroups > limit:
        raise ValueError(expect("workgroups", f"<= {limit}, all resident at once", workgroups))


# Work that depends on the data


def score_blocks(
    request: int, blocks: int, workgroup: int, wave: int, workgroups: int
) -> Iterable[int]:
    """Logical blocks of a request that a wave scores: requests start at different workgroups."""
    waves = workgroups * WAVES
    first = (workgroup * WAVES + wave - request * WAVES) % waves
    return range(first, blocks, waves)


def exchange_threshold(shape: Shape, requests: int, rows: int) -> int:
    """Blocks a request from which sharing the scan saves more than it costs, modelled.

    saved(B) = requests B page (1 - 1/P) / memory rate
    cost     = two waits for a peer + (queries + results(B)) / link rate
    """
    page = BLOCK_TOKENS * (HEAD_DIM // 2 + HEAD_DIM // 16)
    pairs = rows * shape.index_heads * WORD_BYTES
    a_block = requests * page * (1 - 1 / shape.tp) / GFX950.hbm_bytes_per_s
    a_block -= pairs / shape.tp / GFX950.fabric_link_bytes_per_s
    cost = 2 * PEER_SECONDS + pairs * QUERY_WORDS / GFX950.fabric_link_bytes_per_s
    return math.ceil(cost / a_block) if a_block > 0 else NEVER


def expert_list(chosen: Iterable[Iterable[int]]) -> list[int]:
    """Experts that any row goes through, ascending; -1 is no choice."""
    return sorted({expert for row in chosen for expert in row if expert >= 0})


def up_tasks(shape: Shape, experts: list[int]) -> Iterator[tuple[int, int]]:
    """(expert, tile) in the order of the task numbers; the shared expert is `shape.experts`."""
    for tile in range(_tiles(shape.shared)):
        yield shape.experts, tile
    for expert in experts:
        for tile in range(_tiles(shape.intermediate)):
            yield expert, tile


# Memory


def scratch_layout(shape: Shape, max_blocks: int) -> Layout:
    """Regions of the scratch buffer, in bytes. Rows are those of a full batch, MAX_ROWS.

    stream            bf16 [rows, hidden]                 hidden + residual
    normed            E4M3 [rows, 2, hidden] or bf16 [rows, hidden]
    normed_factor     fp32 [rows]                         undoes the scaling of the terms
    projected         bf16 [rows, features]
    q, index_q        bf16 [rows, heads, 128]
    own_q             bf16 [256 workgroups, rows, index_heads, 128], each its own
    all_q             likewise with all ranks' index heads, if they exchange
    selected          int32 [kv_heads, rows, topk]
    part_x            fp32 [kv_heads, rows, topk, 16]
    part_o            fp16 [kv_heads, rows, topk, 2048] in lane order
    attended          as normed, [rows, 2, q_heads * 128]; attended_factor fp32 [rows]
    post              E4M3 [rows, 2, hidden]; post_factor fp32 [rows]
    logits            fp32 [rows, experts]
    active            E4M3 [rows, slots, 2, widest]
    chosen            int32 [rows, chosen]; chosen_weights fp32 [rows, chosen]
    scores            fp32 [index_heads, rows, max_blocks], of a request's last row's candidates
    """
    check_int("max_blocks", max_blocks, 1)
    s, rows = shape, MAX_ROWS
    items = s.kv_heads * rows * s.topk
    sizes = [
        ("stream", 2 * rows * s.hidden),
        ("normed", 2 * rows * s.hidden),
        ("normed_factor", 4 * rows),
        ("projected", 2 * rows * s.features),
        ("q", 2 * rows * s.attended),
        ("index_q", 2 * rows * s.index_heads * HEAD_DIM),
        ("own_q", 2 * MAX_WORKGROUPS * rows * s.index_heads * HEAD_DIM),
        ("all_q", 2 * MAX_WORKGROUPS * rows * s.scored_heads * HEAD_DIM if s.exchange else 0),
        ("selected", 4 * items),
        ("part_x", 4 * GROUP * items),
        ("part_o", PARTIAL_BYTES * items),
        ("attended", 2 * rows * s.attended),
        ("attended_factor", 4 * rows),
        ("post", 2 * rows * s.hidden),
        ("post_factor", 4 * rows),
        ("logits", 4 * rows * s.experts),
        ("active", 2 * rows * s.slots * s.widest),
        ("chosen", 4 * rows * s.chosen),
        ("chosen_weights", 4 * rows * s.chosen),
        # Last: the other offsets do not depend on the batch.
        ("scores", 4 * s.index_heads * rows * max_blocks),
    ]
    return pack(sizes, align=REGION_ALIGN, total_align=REGION_ALIGN)


def state_layout() -> Layout:
    """A rank's own words, zero before the first launch but for generation, which counts from 1.

    generation, error   int64      arrivals  int32      see rocm_msa/device/mailbox.py
    flags               int64 [hand-offs, 256]: the launch in which a workgroup got there
    """
    sizes = [("generation", 8), ("error", 8), ("arrivals", 4)]
    return pack([*sizes, ("flags", 8 * HAND_OFFS * MAX_WORKGROUPS)], align=8)


def mailbox_layout(shape: Shape, max_blocks: int = 1) -> Layout:
    """What the peers write to. Zero before the first launch. max_blocks: most of a request, for the
    exchange.

    errors    int64 [ranks]: the error word that each rank sent
    a region a site: 64-bit words [ranks, hidden / 16, 4, 64], an fp32 value in the low half and the
              tag above it: lane l of tile t holds outputs 16 t + 4 (l // 16) + r of row l % 16
    queries   words [ranks, rows, index_heads, 64]: a rank's index queries, two values a word
    results   words [2 launches, index_heads, rows, max_blocks]: scores of this rank's index heads
    """
    words = shape.tp * _tiles(shape.hidden) * TILE * MAX_ROWS
    sizes = [("errors", WORD_BYTES * shape.tp), *((site, WORD_BYTES * words) for site in SITES)]
    if shape.exchange:
        check_int("max_blocks", max_blocks, 1)
        pairs = MAX_ROWS * shape.index_heads
        sizes.append(("queries", WORD_BYTES * shape.tp * pairs * QUERY_WORDS))
        sizes.append(("results", WORD_BYTES * 2 * pairs * max_blocks))
    return pack(sizes, align=REGION_ALIGN)


def lds_layout(shape: Shape) -> Layout:
    """LDS of a workgroup; phases use `work` one after another.

    table        the NVFP4 table of the phase
    work         norms: sums; products: a tile a wave; attention: V of a page a wave, lists
    choice       int32 [rows, 8] experts of the rows, then fp32 [rows, 8] their weights
    list         int32 [256]: experts in use; then their number, the verdict of the last meeting
    rows         operands of FEW rows, each of 2 bytes a value, then a factor of each
    """
    attention = WAVES * V_BYTES + LISTS_BYTES
    products = WAVES * 2 * TILE * MAX_ROWS * 4
    route = MAX_ROWS * WAVES * 4
    return pack(
        [
            ("table", TABLE_BYTES),
            ("work", max(attention, products, route)),
            ("choice", 2 * 4 * MAX_ROWS * MAX_CHOSEN),
            ("list", 4 * MAX_EXPERTS + 16),
            ("rows", FEW * (2 * max(shape.hidden, shape.attended) + 16)),
        ],
        align=16,
    )


def writes(shape: Shape, phase: str, task: int, rows: int) -> list[tuple[str, int, int]]:
    """(region, first byte, bytes) that a task of a phase with a fixed count writes."""
    s = shape
    if phase == "norm":
        wide = 2 * s.hidden
        return [
            ("stream", task * wide, wide),
            ("normed", task * wide, wide),
            ("normed_factor", 4 * task, 4),
        ]
    if phase == "project":
        return [("projected", 2 * (r * s.features + task * TILE), 2 * TILE) for r in range(rows)]
    if phase == "insert":
        return list(_insert_writes(s, task, rows))
    if phase == "attend":
        parts = s.topk // SLOTS_A_TASK
        item, part = divmod(task, parts)
        head, row = divmod(item, rows)
        first = (head * MAX_ROWS + row) * s.topk + part * SLOTS_A_TASK
        found = [
            ("part_x", 4 * GROUP * first, 4 * GROUP * SLOTS_A_TASK),
            ("part_o", PARTIAL_BYTES * first, PARTIAL_BYTES * SLOTS_A_TASK),
        ]
        if part == 0:
            found.append(("selected", 4 * (head * MAX_ROWS + row) * s.topk, 4 * s.topk))
        return found
    if phase == "join":
        wide = 2 * s.attended
        return [("attended", task * wide, wide), ("attended_factor", 4 * task, 4)]
    if phase in SITES:
        name = OUTPUTS[0] if phase == "down" else OUTPUTS[1]
        return [(name, 2 * (r * s.hidden + task * TILE), 2 * TILE) for r in range(rows)]
    if phase == "route":
        if task < rows:
            return [("post", task * 2 * s.hidden, 2 * s.hidden), ("post_factor", 4 * task, 4)]
        return [("logits", 4 * (r * s.experts + task - rows), 4) for r in range(rows)]
    raise ValueError(expect("phase", "one with a fixed number of tasks", repr(phase)))


def up_writes(shape: Shape, tile: int, row: int, slot: int) -> list[tuple[str, int, int]]:
    """What the task of an expert's tile writes for a row whose slot the expert is."""
    first = 2 * (row * shape.slots + slot) * shape.widest
    return [("active", first + p * shape.widest + tile * TILE, TILE) for p in (0, 1)]


def _insert_writes(s: Shape, task: int, rows: int) -> Iterator[tuple[str, int, int]]:
    groups = -(-s.heads // WAVES)
    tokens, heads = divmod(task, groups)
    for row in range(tokens * TOKENS_A_WAVE, min((tokens + 1) * TOKENS_A_WAVE, rows)):
        for head in range(heads * WAVES, min((heads + 1) * WAVES, s.heads)):
            index = head - s.q_heads - 2 * s.kv_heads
            if head < s.q_heads:
                yield "q", 2 * HEAD_DIM * (row * s.q_heads + head), 2 * HEAD_DIM
            elif 0 <= index < s.index_heads:
                yield "index_q", 2 * HEAD_DIM * (row * s.index_heads + index), 2 * HEAD_DIM


def blocks_of(length: int) -> int:
    """Causal blocks of a row that sees `length` keys."""
    return -(-length // BLOCK_TOKENS)


def chunks(size: int) -> int:
    """Steps along k of a product over `size` inputs."""
    return size // CHUNK

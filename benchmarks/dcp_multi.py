"""One rank's part of bench_dcp_multi.py: the checks, then the times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import distributed

from benchmarks.dcp_cases import (
    DIM,
    HEADS,
    POOL_BYTES,
    TOPK,
    Shape,
    Work,
    make_work,
    ragged,
    random_cache,
    select_alone,
    uniform,
)
from benchmarks.dcp_collective import CollectiveExchange
from dcp.api import DcpError, Exchange
from dcp.gloo import GlooExchange
from dcp.plan import MEASURED_H200, Batch, Scan, decide
from dcp.shard import Site
from rocm_msa.cache import CacheDType, index_page
from rocm_msa.comm.group import DistributedGroup

MAX_ROWS, MAX_BLOCKS = 256, 4096
LAYERS, REPLAYS = 60, 1000
TIMED_REPLAYS = 30
CONTEXTS = (8, 32, 128, 512)  # thousands of tokens


@dataclass
class Team:
    """The ranks: `objects` for the host's agreements, the default group for tensors.

    kinds: of index caches that are looked at. only: part of the names of the shapes.
    """

    rank: int
    ranks: int
    device: torch.device
    faults: list[str] = field(default_factory=list)
    kinds: Sequence[str] = ("nvfp4", "fp8")
    only: str = ""

    def __post_init__(self) -> None:
        self.objects = DistributedGroup(distributed.new_group(backend="gloo"))

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def barrier(self) -> None:
        self.objects.all_gather_object(None)

    def agree(self, what: str, fault: str | None) -> None:
        """Collect a rank's fault from all."""
        for rank, told in enumerate(self.objects.all_gather_object(fault)):
            if told:
                self.faults.append(f"{what}: rank {rank}: {told}")
        self.say(f"{'FAULT' if fault else 'good':6} {what}" + (f": {fault}" if fault else ""))

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def exchange(self, **how) -> Exchange:
        if not self.on_gpu:
            return GlooExchange(None, HEADS)
        from dcp.runner import PeerExchange

        how = {"patience_ms": 20_000, "backend": "triton"} | how
        return PeerExchange(
            self.objects, HEADS, max_rows=MAX_ROWS, max_blocks=MAX_BLOCKS, device=self.device, **how
        )


def run(team: Team, *, quick: bool, times: bool) -> dict:
    """Checks, then times on GPUs; the report, the same on all ranks but for `say`."""
    torch.manual_seed(team.rank)
    exchange = team.exchange()
    check_shapes(team, exchange, shapes(team, quick))
    report = {"ranks": team.ranks, "faults": team.faults, "times": [], "phases": []}
    if team.on_gpu:
        check_replays(team, exchange, 50 if quick else REPLAYS)
        check_late_rank(team, exchange)
        check_missing_rank(team)
        if times and not team.faults:
            report["times"] = [asdict(t) for t in time_shapes(team, exchange, quick)]
            report["phases"] = time_phases(team)
    else:
        team.say("no GPU: nothing was timed")
    exchange.close()
    return report


def shapes(team: Team, quick: bool) -> list[Shape]:
    if not team.on_gpu:
        odd = Shape("5x2 odd", (2600, 0, 129, 128, 4000), 2, 33)
        return [uniform(1, 1, 4096), odd]
    wanted = [ragged(45, 4), ragged(45, 1), ragged(8, 4)]
    requests, contexts = ((1, 45), (8, 128)) if quick else ((1, 8, 45), CONTEXTS)
    wanted += [uniform(n, rows, c * 1024) for n in requests for rows in (1, 4) for c in contexts]
    return [shape for shape in wanted if team.only in shape.name]


# Checks


def pool(shape: Shape, kind: str, copies: int = 1) -> int:
    """Pages of a cache for `copies` works of a shape, as far as memory goes."""
    page = index_page(DIM, CacheDType.parse(kind)).page_bytes
    return max(64, min(shape.pages * copies, POOL_BYTES // page))


def select(exchange: Exchange, work: Work, q: torch.Tensor, **how) -> torch.Tensor:
    return exchange.select(q, *work.paging(), TOPK, **how)


def prepared(team: Team, exchange: Exchange, work: Work, q: torch.Tensor) -> None:
    """Compiled everywhere before anybody waits for anybody."""
    if hasattr(exchange, "prepare"):
        exchange.prepare(q, *work.paging(), TOPK)
    team.barrier()


def difference(got: torch.Tensor, want: torch.Tensor) -> str | None:
    wrong = (got != want).any(-1).nonzero()
    if not len(wrong):
        return None
    head, row = wrong[0].tolist()
    return (
        f"{len(wrong)} of {got[..., 0].numel()} rows differ, the first is head {head}, row {row}: "
        f"{got[head, row].tolist()}, one rank: {want[head, row].tolist()}"
    )


def check_shapes(team: Team, exchange: Exchange, wanted: Sequence[Shape]) -> None:
    """The exchange, and the collectives, against one rank; the same inputs on all ranks."""
    others = CollectiveExchange(None, HEADS)
    for kind in team.kinds:
        for shape in wanted:
            cache = random_cache(pool(shape, kind), kind, team.device)
            work = make_work(shape, cache)
            q = work.queries(exchange.shard)
            prepared(team, exchange, work, q)
            want = select_alone(work, exchange.shard.own_heads)
            got = select(exchange, work, q)
            team.agree(f"{kind} {shape.name}", difference(got, want))
            if min(shape.lens) >= TOPK * 128:  # its rows have 16 blocks, and none is padding
                want = select_alone(work, exchange.shard.own_heads)
                fault = difference(others.select(work, q), want)
                team.agree(f"{kind} {shape.name} by collectives", fault)
    exchange.check()


def check_replays(team: Team, exchange: Exchange, replays: int) -> None:
    """A graph of many layers, replayed; lengths change between replays."""
    lens = [(200_000, 31_000, 900, 64_000), (5, 0, 129, 70_000), (128, 127, 200_000, 1)]
    widest = Shape("", (200_000,) * 4, 2, 1563)
    cache = random_cache(pool(widest, "nvfp4"), "nvfp4", team.device)
    works = [make_work(widest, cache, seed) for seed in range(LAYERS)]
    queries = [w.queries(exchange.shard) for w in works]
    variants = [make_work(Shape("", n, 2, widest.blocks), cache) for n in lens]
    shared = works[0]
    for w in works:  # one batch for all layers, as in a model
        w.table, w.lens, w.num_blocks = shared.table, shared.lens, shared.num_blocks
    outs = torch.empty(
        LAYERS, len(exchange.shard.own_heads), len(shared.index_q), TOPK,
        dtype=torch.int32, device=team.device,
    )  # fmt: skip

    def step() -> None:
        for layer, (w, q) in enumerate(zip(works, queries, strict=True)):
            select(exchange, w, q, layer=layer, out=outs[layer])

    def load(variant: Work) -> None:
        shared.table.copy_(variant.table)
        shared.lens.copy_(variant.lens)
        shared.num_blocks.copy_(variant.num_blocks)

    want = []
    for variant in variants:
        load(variant)
        heads = exchange.shard.own_heads
        want.append(torch.stack([select_alone(w, heads) for w in works]))
    prepared(team, exchange, works[0], queries[0])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    wrong = torch.zeros(len(variants), dtype=torch.int64, device=team.device)
    team.barrier()
    for replay in range(replays):
        at = replay % len(variants)
        load(variants[at])
        graph.replay()
        wrong[at] += (outs != want[at]).sum()
    torch.cuda.synchronize()
    exchange.check()
    count = int(wrong.sum())
    fault = f"{count} wrong ids in {replays} replays" if count else None
    team.agree(f"{replays} replays of {LAYERS} layers", fault)


def check_late_rank(team: Team, exchange: Exchange) -> None:
    work = make_work(
        uniform(8, 1, 32 * 1024), random_cache(2048, "nvfp4", team.device)
    )  # fmt: skip
    q = work.queries(exchange.shard)
    prepared(team, exchange, work, q)
    want = select_alone(work, exchange.shard.own_heads)
    if team.rank == 1:
        time.sleep(1.0)
    got = select(exchange, work, q)
    fault = difference(got, want)
    exchange.check()
    team.agree("a rank that is a second late", fault)


def check_missing_rank(team: Team) -> None:
    """Rank 1 does not launch: START, peer 1, on all others, in bounded time; then it hears so."""
    exchange = team.exchange(patience_ms=300)
    work = make_work(
        uniform(8, 1, 32 * 1024), random_cache(2048, "nvfp4", team.device)
    )  # fmt: skip
    q, fault = work.queries(exchange.shard), None
    prepared(team, exchange, work, q)
    if team.rank == 1:
        team.barrier()
    began = time.monotonic()
    ids = select(exchange, work, q)
    torch.cuda.synchronize()
    took = time.monotonic() - began
    if team.rank != 1:
        team.barrier()
    try:
        exchange.check()
        fault = "no error"
    except DcpError as error:
        if (error.peer, error.site, error.generation) != (1, Site.START, 1):
            fault = str(error)
        elif not (ids == -1).all():
            fault = "ids of a launch that failed"
        elif took > 10:
            fault = f"the error took {took:.1f} s"
    team.agree("a rank that never launches", fault)
    exchange.close()


# Times


@dataclass(frozen=True)
class Row:
    """Microseconds a layer, of the slowest rank in each replay. `shared`: what plan.py chooses."""

    ranks: int
    kind: str
    shape: str
    who: str
    median: float
    low: float
    high: float
    shared: bool


def time_shapes(team: Team, exchange: Exchange, quick: bool) -> list[Row]:
    rows = []
    others = CollectiveExchange(None, HEADS)
    own = exchange.shard.own_heads
    for kind in team.kinds:
        page = index_page(DIM, CacheDType.parse(kind)).page_bytes
        for shape in shapes(team, quick):
            nbytes = shape.pages * page
            copies = max(1, min(16, int(2.2 * _l2_bytes()) // nbytes + 1))
            cache = random_cache(pool(shape, kind, copies), kind, team.device)
            works = [make_work(shape, cache, seed) for seed in range(copies)]
            queries = [w.queries(exchange.shard) for w in works]
            outs = [select_alone(w, own) for w in works]
            pairs = [(works[i % copies], queries[i % copies], outs[i % copies]) for i in range(32)]
            batch = Batch(len(shape.lens), shape.rows, shape.blocks)
            scan = Scan(page, DIM * 2, TOPK)
            shared = decide(exchange.shard, batch, scan, costs=MEASURED_H200).shared
            peers = {
                "alone": [lambda w=w: select_alone(w, own) for w, _, _ in pairs],
                "exchange": [
                    lambda w=w, q=q, o=o: select(exchange, w, q, out=o) for w, q, o in pairs
                ],
                "collectives": [lambda w=w, q=q: others.select(w, q) for w, q, _ in pairs],
            }
            prepared(team, exchange, works[0], queries[0])
            for who, calls in peers.items():
                at = measure(team, calls)
                rows.append(Row(team.ranks, kind, shape.name, who, *at, shared))
            alone, ours, theirs = (r.median for r in rows[-3:])
            mark = " PLAN IS SLOWER" if shared and ours > alone else ""
            team.say(
                f"{team.ranks} ranks {kind:5} {shape.name:18} alone {alone:8.1f}  exchange "
                f"{ours:8.1f} ({alone / ours:.2f}x)  collectives {theirs:8.1f}{mark}"
            )
            exchange.check()
    return rows


def measure(team: Team, calls: Sequence[Callable[[], object]]) -> tuple[float, float, float]:
    """(median, low, high) microseconds a call: graph replay on all ranks at once."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        keep = [call() for call in calls]
    team.barrier()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(TIMED_REPLAYS):
        torch.cuda.synchronize()
        team.barrier()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(calls))
    del keep
    slowest = [max(one) for one in zip(*team.objects.all_gather_object(times), strict=True)]
    return statistics.median(slowest), min(slowest), max(slowest)


def time_phases(team: Team) -> list[dict]:
    """Fixed cost: the phases of the first program of a launch whose scan is two blocks a rank."""
    from dcp.exchange_triton_kernel import PHASES

    ticks = torch.zeros(len(PHASES) + 1, dtype=torch.int64, device=team.device)
    exchange, found = team.exchange(times=ticks), []
    for requests, rows in ((1, 1), (45, 4)):
        shape = uniform(requests, rows, team.ranks * 2 * 128 + 64)
        work = make_work(shape, random_cache(pool(shape, "nvfp4"), "nvfp4", team.device))
        q = work.queries(exchange.shard)
        prepared(team, exchange, work, q)
        seen = []
        for _ in range(100):
            team.barrier()
            select(exchange, work, q)
            torch.cuda.synchronize()
            seen.append((ticks[1:] - ticks[:-1]).tolist())
        medians = [statistics.median(column) / 1000 for column in zip(*seen, strict=True)]
        phases = dict(zip(PHASES, medians, strict=True))
        everyone = team.objects.all_gather_object(phases)
        found += [{"shape": shape.name, "rank": r, "us": p} for r, p in enumerate(everyone)]
        team.say(f"phases, us, {shape.name}: {phases}")
    exchange.close()
    return found


def _l2_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size

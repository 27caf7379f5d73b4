"""The exchange's handshake on real hardware: streams of one process, processes over IPC, graphs.

Everything here needs a GPU (`make test-gpu`). One is enough: the ranks share it, each with its part
of the resident programs. Processes take a GPU each where there are enough; on one GPU without MPS
they take turns, so that these cases are small. Compared with the single-rank Triton kernels, bit
for bit.
"""

import time

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.dcp_cases import (
    HEADS,
    TOPK,
    Shape,
    make_work,
    random_cache,
    select_alone,
    uniform,
)
from dcp import exchange_triton
from dcp.api import DcpError
from dcp.plan import Results
from dcp.runner import PeerExchange
from dcp.shard import Site
from rocm_msa.comm.group import DistributedGroup
from tests.comm.ranks import run_processes, run_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LAYERS, REPLAYS = 60, 1000
MAX_ROWS, MAX_BLOCKS = 64, 600
LENS = [(60_000, 900, 129, 31_000), (5, 0, 128, 70_000), (127, 76_000, 1, 2_000)]
WIDE = Shape("", (76_800,) * 4, 2, 600)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class Streams:
    """Ranks as streams of this process; `ends[rank]` is the exchange of `streams[rank]`."""

    def __init__(self, ranks: int, **how) -> None:
        grid = exchange_triton.programs(device()) // ranks
        how = {"patience_ms": 10_000, "grid": grid, "backend": "triton"} | how

        self.groups = {}

        def make(group):
            self.groups[group.rank] = group
            return PeerExchange(
                group, HEADS, max_rows=MAX_ROWS, max_blocks=MAX_BLOCKS, device=device(), **how
            )

        self.ends = run_threads(make, ranks)
        for end in self.ends:
            assert isinstance(end, PeerExchange), end
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]

    def __enter__(self):
        return self

    def __exit__(self, failed, *exc) -> None:
        torch.cuda.synchronize()
        if failed:  # ends may disagree on whether to wait for each other
            self.groups[0].leave()
        run_threads(lambda group: self.ends[group.rank].close(), len(self.ends))

    def on(self, rank: int):
        return torch.cuda.stream(self.streams[rank])

    def check(self) -> None:
        for end in self.ends:
            end.check()


class Model:
    """One rank's inputs and outputs of LAYERS layers that share one batch, and what is wanted."""

    def __init__(self, end: PeerExchange, cache, layers: int = LAYERS) -> None:
        self.end = end
        self.works = [make_work(WIDE, cache, seed) for seed in range(layers)]
        self.queries = [w.queries(end.shard) for w in self.works]
        self.batch = self.works[0]
        for w in self.works:
            w.table, w.lens, w.num_blocks = self.batch.table, self.batch.lens, self.batch.num_blocks
        own = end.shard.own_heads
        self.outs = torch.empty(
            layers, len(own), len(self.batch.index_q), TOPK, dtype=torch.int32, device=device()
        )  # fmt: skip
        self.variants = [make_work(Shape("", n, 2, WIDE.blocks), cache) for n in LENS]
        self.want = []
        for at in range(len(LENS)):
            self.load(at)
            alone = [select_alone(w, own) for w in self.works]
            self.want.append(torch.stack(alone))
        self.wrong = torch.zeros((), dtype=torch.int64, device=device())

    def load(self, at: int) -> None:
        """Another batch, in place, on the current stream."""
        for name in ("table", "lens", "num_blocks"):
            getattr(self.batch, name).copy_(getattr(self.variants[at], name))

    def prepare(self) -> None:
        """Load all that will run: loading may wait for the GPU, where a rank may wait for us."""
        self.end.prepare(self.queries[0], *self.batch.paging(), TOPK, out=self.outs[0])
        self.compare(0)
        self.wrong.zero_()

    def step(self) -> None:
        for layer, (w, q) in enumerate(zip(self.works, self.queries, strict=True)):
            self.end.select(q, *w.paging(), TOPK, layer=layer, out=self.outs[layer])

    def compare(self, at: int) -> None:
        """Count, on the device, what is not as wanted."""
        self.wrong += (self.outs != self.want[at]).sum()


@pytest.mark.parametrize("form", list(Results))
@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_streams_of_one_process(ranks, kind, form):
    cache = random_cache(700, kind, device())
    with Streams(ranks, results=form) as group:
        for shape in (uniform(1, 1, 128), uniform(3, 4, 40_000), Shape("", LENS[0], 1, 600)):
            work = make_work(shape, cache)
            queries = [work.queries(end.shard) for end in group.ends]
            outs = [q.new_empty(q.shape[1], q.shape[0], TOPK, dtype=torch.int32) for q in queries]
            group.ends[0].prepare(queries[0], *work.paging(), TOPK, out=outs[0])
            torch.cuda.synchronize()
            for rank, end in enumerate(group.ends):
                with group.on(rank):
                    end.select(queries[rank], *work.paging(), TOPK, out=outs[rank])
            torch.cuda.synchronize()
            group.check()
            for end, out in zip(group.ends, outs, strict=True):
                want = select_alone(work, end.shard.own_heads)
                assert torch.equal(out, want)


@pytest.mark.parametrize("ranks", [2, 4])
def test_graphs_of_sixty_layers_replayed(ranks):
    """1,000 replays with changing lengths, every selection compared."""
    cache = random_cache(700, "nvfp4", device())
    with Streams(ranks) as group:
        models = [Model(end, cache) for end in group.ends]
        for model in models:
            model.prepare()
        torch.cuda.synchronize()
        graphs = []
        for rank, model in enumerate(models):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=group.streams[rank]):
                model.step()
            graphs.append(graph)
        torch.cuda.synchronize()
        for replay in range(REPLAYS):
            at = replay % len(LENS)
            for rank, model in enumerate(models):
                with group.on(rank):
                    model.load(at)
                    graphs[rank].replay()
                    model.compare(at)
        torch.cuda.synchronize()
        group.check()
        assert [int(model.wrong) for model in models] == [0] * ranks
        assert [end.generation for end in group.ends] == [1 + LAYERS * REPLAYS] * ranks


def one_launch(group: Streams, ranks_that_launch):
    """(work, queries, outs) of a launch by these ranks; rank 1's is a second late."""
    work = make_work(uniform(4, 2, 20_000), random_cache(700, "nvfp4", device()))
    queries = [work.queries(end.shard) for end in group.ends]
    outs = [q.new_full((q.shape[1], q.shape[0], TOPK), 7, dtype=torch.int32) for q in queries]
    group.ends[0].prepare(queries[0], *work.paging(), TOPK, out=outs[0])
    torch.cuda._sleep(1)  # loaded before a rank waits
    torch.cuda.synchronize()
    for rank in ranks_that_launch:
        with group.on(rank):
            if rank == 1:
                torch.cuda._sleep(int(1.5e9))  # cycles: about a second
            group.ends[rank].select(queries[rank], *work.paging(), TOPK, out=outs[rank])
    torch.cuda.synchronize()
    return work, queries, outs


def test_a_rank_that_comes_late_is_awaited():
    with Streams(2) as group:
        work, _, outs = one_launch(group, (0, 1))
        group.check()
        for end, out in zip(group.ends, outs, strict=True):
            assert torch.equal(out, select_alone(work, end.shard.own_heads))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_never_launches_is_named(ranks):
    """By all others; should it launch after all, it hears of it."""
    with Streams(ranks, patience_ms=200) as group:
        there = [rank for rank in range(ranks) if rank != 1]
        work, queries, outs = one_launch(group, there)
        for rank in there:
            with pytest.raises(DcpError) as caught:
                group.ends[rank].check()
            error = caught.value
            assert (error.peer, error.site, error.generation) == (1, Site.START, 1)
            assert error.rank in there
            assert (outs[rank] == -1).all()
        group.ends[1].select(queries[1], *work.paging(), TOPK, out=outs[1])
        torch.cuda.synchronize()
        with pytest.raises(DcpError) as caught:
            group.ends[1].check()
        assert (caught.value.peer, caught.value.site) == (1, Site.START)
        assert (outs[1] == -1).all()


def test_a_rank_that_left_a_launch_out_is_found():
    with Streams(2, patience_ms=200) as group:
        work = make_work(uniform(4, 2, 20_000), random_cache(700, "nvfp4", device()))
        queries = [work.queries(end.shard) for end in group.ends]
        outs = [torch.empty(2, 8, TOPK, dtype=torch.int32, device=device()) for _ in queries]
        group.ends[0].prepare(queries[0], *work.paging(), TOPK, out=outs[0])
        torch.cuda.synchronize()
        for rank, layer in ((0, 3), (1, 4)):
            with group.on(rank):
                group.ends[rank].select(
                    queries[rank], *work.paging(), TOPK, layer=layer, out=outs[rank]
                )
        torch.cuda.synchronize()
        for end, out in zip(group.ends, outs, strict=True):
            with pytest.raises(DcpError) as caught:
                end.check()
            assert caught.value.site == Site.SHAPE and (out == -1).all()


# Processes


def _process_device(rank: int, ranks: int) -> tuple[torch.device, int]:
    """(the rank's GPU, programs of its launches)."""
    cards = torch.cuda.device_count()
    torch.cuda.set_device(rank % cards)
    sharing = -(-ranks // cards)
    return device(), exchange_triton.programs(device()) // sharing


def _in_a_process(rank: int, ranks: int, layers: int, replays: int):
    """A graph, replayed with changing lengths: (wrong ids, generation)."""
    place, grid = _process_device(rank, ranks)
    group = DistributedGroup()
    end = PeerExchange(
        group, HEADS, max_rows=MAX_ROWS, max_blocks=MAX_BLOCKS, device=place, backend="triton",
        grid=grid, patience_ms=60_000,
    )  # fmt: skip
    model = Model(end, random_cache(700, "nvfp4", place), layers)
    model.prepare()
    group.all_gather_object(None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.step()
    for replay in range(replays):
        model.load(replay % len(LENS))
        graph.replay()
        model.compare(replay % len(LENS))
    torch.cuda.synchronize()
    end.check()
    outcome = int(model.wrong), end.generation
    end.close()
    end.close()
    return outcome


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_over_ipc(ranks, tmp_path):
    alone = torch.cuda.device_count() < ranks
    layers, replays = (6, 20) if alone else (LAYERS, REPLAYS)
    outcomes = run_processes(_in_a_process, ranks, tmp_path, layers, replays)
    assert outcomes == [(0, 1 + layers * replays)] * ranks


def _one_is_missing(rank: int, ranks: int):
    """Rank 1 launches when the other one has given up; what each is told."""
    place, grid = _process_device(rank, ranks)
    group = DistributedGroup()
    end = PeerExchange(
        group, HEADS, max_rows=MAX_ROWS, max_blocks=MAX_BLOCKS, device=place, backend="triton",
        grid=grid, patience_ms=500,
    )  # fmt: skip
    work = make_work(uniform(4, 2, 20_000), random_cache(700, "nvfp4", place))
    q = work.queries(end.shard)
    end.prepare(q, *work.paging(), TOPK)
    group.all_gather_object(None)
    if rank == 1:
        group.all_gather_object(None)
    began = time.monotonic()
    end.select(q, *work.paging(), TOPK)
    torch.cuda.synchronize()
    with pytest.raises(DcpError) as caught:
        end.check()
    assert time.monotonic() - began < 60
    if rank == 0:
        group.all_gather_object(None)
    end.close()
    error = caught.value
    return error.rank, error.peer, int(error.site), error.generation


def test_a_process_that_never_launches_is_named(tmp_path):
    told = run_processes(_one_is_missing, 2, tmp_path)
    assert told == [(0, 1, int(Site.START), 1)] * 2

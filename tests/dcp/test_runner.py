"""The exchange over peer memory: the runtime is a fake, the kernels run in the emulator."""

import contextlib
import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from dcp.api import DcpError
from dcp.mailbox_layout import ErrorWord
from dcp.plan import Results
from dcp.runner import PeerExchange
from dcp.shard import Site
from gfx950_emu import Machine, Schedule
from rocm_msa import launcher
from rocm_msa.comm.peer_memory import PeerMemoryError
from rocm_msa.ops import attention_checks, dispatch, rows
from tests.comm import fake_peers
from tests.comm.ranks import run_processes, run_threads
from tests.dcp.emulated_ranks import queueing
from tests.dcp.triton_cases import DIM, Case

CASE = Case((700, 0, 129), rows=2)
RANKS = 2


@pytest.fixture(autouse=True)
def nothing_left():
    before = fake_peers.live()
    yield
    assert fake_peers.live() == before


def make(group, **change):
    sizes = {"max_rows": 8, "max_blocks": 16, "device": "cpu", "topk": 4, "head_dim": DIM}
    how = {"results": Results.CANDIDATES, "grid": 2, "patience_ms": 1, "backend": "triton"}
    return PeerExchange(group, CASE.heads, **sizes | how | change, runtime=fake_peers.runtime())


@contextlib.contextmanager
def exchanges(**change):
    """One end a rank, all in this process."""
    made = run_threads(lambda group: make(group, **change), RANKS)
    try:
        for one in made:
            assert isinstance(one, PeerExchange), one
        yield made
    finally:
        for _ in range(2):
            run_threads(lambda group: made[group.rank].close(), RANKS)
        assert all(one._memory.closed for one in made)


def reachable(made, exchange):
    """What the kernel of an exchange finds through pointers in memory."""
    if exchange._memory.closed:
        return []
    boxes = [one._memory.view(0, (one._memory.nbytes,), torch.uint8) for one in made]
    return [*boxes, exchange.status]


def queue(machine, made, rank, **how):
    """Queue a launch; returns what it will write."""
    index_q, cache, table, lens, num_blocks = CASE.tensors
    exchange = made[rank]
    own = exchange.shard.own_heads
    with queueing(machine, rank, reachable(made, exchange)):
        return exchange.select(
            index_q[:, own.start : own.stop].contiguous(), cache, table, lens, CASE.rows,
            num_blocks, *CASE.kept, **how,
        )  # fmt: skip


def test_selections_are_one_ranks():
    with exchanges() as made:
        for step in range(3):
            machine = Machine(schedule=Schedule("random", step, (1, 3000)))
            outs = [queue(machine, made, rank, layer=step) for rank in range(RANKS)]
            machine.run().raise_for_findings()
            for one, out in zip(made, outs, strict=True):
                own = one.shard.own_heads
                assert torch.equal(out, CASE.alone[own.start : own.stop])
                one.check()
                assert one.generation == step + 2
    with pytest.raises(RuntimeError, match="closed"):
        queue(Machine(), made, 0)


def test_a_fault_is_raised_by_check_and_select():
    with exchanges() as made:
        machine = Machine()
        out = queue(machine, made, 0)
        machine.run().raise_for_findings()
        assert (out == -1).all()
        for act in (made[0].check, lambda: queue(Machine(), made, 0)):
            with pytest.raises(DcpError) as caught:
                act()
            error = caught.value
            assert (error.rank, error.peer, error.site, error.generation) == (0, 1, Site.START, 1)
        made[1].check()  # it has not launched
        machine = Machine()
        queue(machine, made, 1)
        machine.run()
        with pytest.raises(DcpError, match="rank 0: rank 1 did not begin the launch"):
            made[1].check()
        # With an error on a rank it asks nothing of the others when it closes.
        made[0].close()
        made[1].close()
        for one in made:
            one._memory._free()  # the fake has no end of the process


class _Seen(TorchDispatchMode):
    """Which operations are run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_select_allocates_and_computes_nothing_on_the_host_side(monkeypatch):
    for module in (dispatch, rows, attention_checks):
        if hasattr(module, "on_host"):
            monkeypatch.setattr(module, "on_host", lambda tensor: False)
    with exchanges() as made:
        machine, outs = Machine(), []
        for one in made:
            index_q = CASE.tensors[0]  # made before
            out = torch.empty(
                (one.shard.heads_per_rank, len(index_q), 4), dtype=torch.int32
            )  # fmt: skip
            seen = _Seen()
            own = one.shard.own_heads
            q = index_q[:, own.start : own.stop].contiguous()
            _, cache, table, lens, num_blocks = CASE.tensors
            with queueing(machine, one.shard.rank, reachable(made, one)), seen:
                got = one.select(
                    q, cache, table, lens, CASE.rows, num_blocks, *CASE.kept, out=out
                )  # fmt: skip
            assert got is out
            outs.append(out)
            assert seen.names <= {"view", "_local_scalar_dense", "alias", "detach"}, seen.names
        machine.run().raise_for_findings()
        for one, out in zip(made, outs, strict=True):
            assert torch.equal(out, CASE.alone[list(one.shard.own_heads)])


def test_prepare_launches_nothing():
    index_q, cache, table, lens, num_blocks = CASE.tensors
    with exchanges() as made:
        machine = Machine()
        q = index_q[:, :2].contiguous()
        with queueing(machine, 0, reachable(made, made[0])):
            made[0].prepare(q, cache, table, lens, CASE.rows, num_blocks, *CASE.kept)
        assert machine.queue == [] and made[0].generation == 1


class _Recorder:
    device = torch.device("cpu")

    def __init__(self):
        self.calls = []

    def launch(self, build, grid, args):
        self.calls.append((build, grid, args))


def test_the_compiled_backend_gets_the_same_memory():
    recorder = _Recorder()
    with launcher.using(recorder), exchanges(backend=None) as made:
        assert [one.backend for one in made] == ["flydsl"] * RANKS
        index_q, cache, table, lens, num_blocks = CASE.tensors
        q = index_q[:, :2].contiguous()
        made[1].prepare(q, cache, table, lens, CASE.rows, num_blocks, *CASE.kept)
        made[1].select(q, cache, table, lens, CASE.rows, num_blocks, *CASE.kept, layer=9)
        ((build, grid, args),) = recorder.calls
        assert grid == (2,) and build.ranks == RANKS and build.results == "candidates"
        passed = [a for a in args if isinstance(a, torch.Tensor)]
        (addresses,) = [t for t in passed if t.dtype == torch.int64]
        assert addresses.tolist() == [*made[1]._memory.addresses, made[1].status.data_ptr()]
        assert any(t is made[1]._state for t in passed)
    with exchanges(backend=None) as made:
        assert [one.backend for one in made] == ["triton"] * RANKS


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_rows": 9}, "rank 1: geometry: expected Geometry"),
        ({"results": None}, "rank 1: results: expected Results.CANDIDATES, as rank 0, got None"),
        ({"backend": "flydsl"}, "rank 1: backend: expected triton, as rank 0, got flydsl"),
    ],
)
def test_ranks_that_differ_all_raise(change, reason):
    made = run_threads(lambda group: make(group, **(change if group.rank else {})), RANKS)
    assert [type(one) for one in made] == [PeerMemoryError] * RANKS
    assert any(r.startswith(reason) for r in made[0].reasons)
    assert made[0].reasons == made[1].reasons


def test_arguments_are_checked():
    (group,) = run_threads(lambda group: group, 1)
    for change, words in (
        ({"max_blocks": 0}, "max_blocks: expected >= 1, got 0"),
        ({"max_rows": 0}, "rows: expected >= 1, got 0"),
        ({"backend": "hip"}, "backend: expected flydsl or triton, got 'hip'"),
        ({"patience_ms": 0}, "patience_ms: expected >= 1, got 0"),
        ({"head_dim": 65}, "head_dim: expected even, got 65"),
    ):
        with pytest.raises(ValueError, match=words):
            make(group, **change)
    with exchanges() as made:
        index_q, cache, table, lens, num_blocks = CASE.tensors
        good = [index_q[:, :2].contiguous(), cache, table, lens, CASE.rows, num_blocks, 4]
        for at, value, words in (
            (0, index_q[:, :1].contiguous(), r"index_q.shape\[1\]: expected 2 heads"),
            (0, good[0].float(), "index_q.dtype: expected bf16 or fp16, got torch.float32"),
            (0, good[0].transpose(1, 2).contiguous().transpose(1, 2), r"index_q.stride\(\)"),
            (2, table.repeat(1, 9), "geometry.slots"),
            (2, table.t().contiguous().t(), r"block_table.stride\(1\): expected 1, got 3"),
            (5, torch.stack([num_blocks] * 2, 1)[:, 0], r"num_blocks.stride\(\)"),
            (6, 5, "geometry.topk"),
        ):
            args = [*good[:at], value, *good[at + 1 :]]
            with pytest.raises((ValueError, NotImplementedError), match=words):
                made[0].select(*args)


def _in_processes(rank, ranks):
    exchange = make(None)
    error = ErrorWord(Site.RESULTS, peer=1, rank=0, generation=77)
    exchange.status.fill_(error.word)
    try:
        exchange.check()
    except DcpError as raised:
        told = str(raised)
    exchange.status.zero_()
    table = exchange._addresses.tolist()
    exchange.close()
    exchange.close()
    return told, len(set(table)), dataclasses.asdict(exchange.shard), fake_peers.live()


@pytest.mark.slow
def test_processes(tmp_path):
    for rank, outcome in enumerate(run_processes(_in_processes, 2, tmp_path)):
        told, places, shard, live = outcome
        assert "the results of rank 1 did not come (site RESULTS, generation 77)" in told
        assert (places, shard["rank"], live) == (3, rank, (0, 0))

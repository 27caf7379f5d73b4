"""Peer memory: all ranks have it, or all raise with the same reasons; who frees what, and when."""

import os
import signal

import pytest
import torch
from torch import distributed

from rocm_msa.comm.group import DistributedGroup, as_group
from rocm_msa.comm.peer_memory import PAGE, PeerMemory, PeerMemoryError
from tests.comm import fake_peers
from tests.comm.ranks import run_processes, run_threads, thread_groups

CPU = torch.device("cpu")
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_left():
    before = fake_peers.live()
    yield
    assert fake_peers.live() == before


def create(group, nbytes=100, **how):
    how = {"runtime": fake_peers.runtime()} | how
    return PeerMemory(group, nbytes, CPU, **how)


# Ranks that are threads


def test_ranks_of_one_process_share_addresses():
    def use(group):
        memory = create(group, PAGE + 1)
        assert memory.nbytes == 2 * PAGE and memory.table.tolist() == list(memory.addresses)
        own = memory.view(8, (2, 3), torch.int32)
        assert own.eq(0).all() and own.data_ptr() == memory.addresses[memory.rank] + 8
        own.fill_(memory.rank + 1)
        group.all_gather_object(None)
        place, offset = memory.addresses[1 - memory.rank], memory.addresses[memory.rank]
        theirs = memory.view(0, (8,), torch.int32).clone()
        memory.close()
        memory.close()
        assert memory.closed
        return place, offset, theirs.tolist()

    first, second = run_threads(use, 2)
    assert first[:2] == second[1::-1]
    assert first[2] == [0, 0, 1, 1, 1, 1, 1, 1] and second[2] == [0, 0, 2, 2, 2, 2, 2, 2]


def test_one_rank_needs_no_peer():
    def use(group):
        memory = create(group)
        memory.close()
        return memory.ranks

    assert run_threads(use, 1) == [1]


def test_views_stay_inside():
    def use(group):
        memory = create(group)
        for offset, shape in ((4, (1,)), (PAGE - 8, (2,)), (PAGE, (1,))):
            with pytest.raises(ValueError, match="offset: expected aligned"):
                memory.view(offset, shape, torch.int64)
        with pytest.raises(ValueError, match="offset"):
            memory.view(-8, (1,), torch.int64)
        memory.close()
        with pytest.raises(RuntimeError, match="closed"):
            memory.view(0, (1,), torch.int64)

    assert run_threads(use, 1) == [None]


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"nbytes": PAGE + 1}, [f"rank 1: nbytes: expected {PAGE}, as rank 0, got {2 * PAGE}"]),
        ({"terms": {"layout": "cd", "version": 3}},
         ["rank 1: layout: expected ab, as rank 0, got cd"]),
        ({"terms": {"version": 4}}, ["rank 1: layout: expected ab, as rank 0, got nothing",
                                     "rank 1: version: expected 3, as rank 0, got 4"]),
        ({"platform": "cuda"}, ["rank 1: runtime: expected hip, as rank 0, got cuda"]),
        ({"nbytes": 0}, ["rank 1: ValueError: nbytes: expected >= 1, got 0"]),
        ({"nbytes": 1.5}, ["rank 1: TypeError: nbytes: expected an int, got 1.5"]),
        ({"runtime": None},
         ["rank 1: RuntimeError: device: expected a GPU, got cpu"]),
    ],
)  # fmt: skip
def test_all_ranks_raise_all_reasons(change, reasons):
    def use(group):
        how = {"nbytes": 100, "terms": {"layout": "ab", "version": 3}, "platform": "hip"}
        if group.rank == 1:
            how |= change
        how.setdefault("runtime", fake_peers.runtime(how["platform"]))
        del how["platform"]
        create(group, **how)

    outcomes = run_threads(use, 3)
    assert [type(o) for o in outcomes] == [PeerMemoryError] * 3
    assert all(list(o.reasons) == reasons for o in outcomes)
    assert str(outcomes[0]) == "peer memory of 3 ranks:\n  - " + "\n  - ".join(reasons)


def test_ranks_of_one_process_are_on_one_device():
    def use(group):
        PeerMemory(group, 100, ("cpu", "meta")[group.rank], runtime=fake_peers.runtime())

    first, second = run_threads(use, 2)
    assert first.reasons == second.reasons and len(first.reasons) == 2
    assert first.reasons[0] == (
        "rank 0: ValueError: device: expected cpu in one process, got rank 1 of this process on "
        "meta"
    )


def test_a_failed_close_leaves_the_memory(caplog):
    """The peer that did not unmap may still write there."""

    class Stuck:
        platform = "hip"

        def __init__(self):
            self.freed = []

        def allocate(self, nbytes):
            return 4096

        def clear(self, address, nbytes):
            pass

        def export(self, address):
            return b"h" * 64

        def synchronize(self, subject):
            pass

        def free(self, address):
            self.freed.append(address)

    stuck = Stuck()

    class Silent:
        rank, ranks, gone = 0, 1, False

        def all_gather_object(self, value):
            if self.gone:
                raise RuntimeError("connection closed by peer")
            return [value]

    group = Silent()
    memory = PeerMemory(group, 1, CPU, runtime=stuck)
    group.gone = True
    memory.close()
    assert stuck.freed == [] and "connection closed by peer" in caplog.text
    assert f"leaves {PAGE} bytes" in caplog.text
    memory = None
    group.gone = False
    memory = PeerMemory(group, 1, CPU, runtime=stuck)
    memory.close(wait=False)
    assert stuck.freed == []
    memory = PeerMemory(group, 1, CPU, runtime=stuck)
    memory.close()
    assert stuck.freed == [4096]


def test_a_group_is_checked():
    (group,) = thread_groups(1)
    assert as_group(group) is group
    group.rank = -1
    with pytest.raises(ValueError, match=r"group.rank: expected 0..0, got -1"):
        as_group(group)


# Ranks that are processes, in a gloo group


def _fill_peers(rank, ranks):
    """Each rank writes its number into its row of every peer's memory."""
    memory = create(None)
    group = DistributedGroup()
    runtime_live = fake_peers.live()
    import ctypes

    for address in memory.addresses:
        row = (ctypes.c_int32 * 4).from_address(address + 16 * rank)
        assert list(row) == [0] * 4
        row[:] = [rank + 1] * 4
    group.all_gather_object(None)
    seen = memory.view(0, (ranks, 4), torch.int32).tolist()
    memory.close()
    return seen, runtime_live, fake_peers.live()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=slow)])
def test_processes_write_to_each_other(ranks, tmp_path):
    for outcome in run_processes(_fill_peers, ranks, tmp_path):
        assert outcome == ([[r + 1] * 4 for r in range(ranks)], (1, ranks - 1), (0, 0))


def _fail_on_one(rank, ranks, call):
    import contextlib

    with fake_peers.failing(call) if rank == 1 else contextlib.nullcontext():
        try:
            create(None, terms={"layout": rank if call == "none" else 0})
        except PeerMemoryError as error:
            return error.reasons, fake_peers.live()
    return "no error", fake_peers.live()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("IpcOpenMemHandle", "rank 1: HipError: hipIpcOpenMemHandle for the memory of rank 0"),
        pytest.param(
            "ExtMallocWithFlags", "rank 1: HipError: hipExtMallocWithFlags for 2097152 bytes",
            marks=slow,
        ),
        pytest.param("none", "rank 1: layout: expected 0, as rank 0, got 1", marks=slow),
    ],
)  # fmt: skip
def test_one_process_fails_and_all_raise(call, reason, tmp_path):
    first, second = run_processes(_fail_on_one, 2, tmp_path, call)
    assert first == second
    reasons, live = first
    assert len(reasons) == 1 and reasons[0].startswith(reason) and live == (0, 0)


def _end_early(rank, ranks):
    if rank == 1:
        distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()
    try:
        create(None)
    except PeerMemoryError as error:
        return error.reasons, fake_peers.live()
    return "no error"


@slow
def test_a_process_that_ends_is_an_error_of_the_others(tmp_path):
    survivor, killed = run_processes(_end_early, 2, tmp_path)
    assert killed == -signal.SIGKILL
    reasons, live = survivor
    assert reasons[0].startswith("rank 0 heard nothing of the others")
    assert live == (1, 0)  # its own memory stays: a peer might have mapped it

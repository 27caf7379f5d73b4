"""The recorder of graphs: what a replay does, and what a capture refuses."""

from __future__ import annotations

import pytest
import torch

from rocm_msa import launcher
from tests.vllm_plugin.recorded_graph import RecordedGraph, Refused, kernel


def test_nothing_runs_until_it_is_replayed_and_then_on_the_same_memory():
    x, total = torch.ones(3), torch.zeros(3)
    graph = RecordedGraph()
    with graph.capturing():
        y = x * 2 + 1
        total.add_(y)
        low = y[:2].view(1, 2)
    assert total.tolist() == [0, 0, 0] and y.isnan().all()
    for value, sums in ((1, 3), (4, 12)):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value + 1] * 3
        assert total.tolist() == [sums] * 3 and low.tolist() == [[2 * value + 1] * 2]


def test_what_was_made_outside_is_not_made_again():
    x = torch.ones(2)
    doubled, graph = x * 2, RecordedGraph()
    with graph.capturing():
        y = doubled + 0
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [2, 2]


def test_memory_that_a_step_does_not_write_holds_poison_in_every_replay():
    graph = RecordedGraph()
    with graph.capturing():
        ids, x = torch.empty(2, dtype=torch.int32), torch.empty(2)
        x[:1].fill_(1)
    x.zero_()
    ids.zero_()
    graph.replay()
    assert x[0] == 1 and x[1].isnan() and (ids < -1000).all()


def test_indices_and_writes_through_views():
    table, at, out = torch.arange(10.0), torch.tensor([3, 1]), torch.zeros(2, 2)
    graph = RecordedGraph()
    with graph.capturing():
        out[1].copy_(table[at])
        torch.add(table[:2], 1, out=out[0])
    at.copy_(torch.tensor([9, 0]))
    graph.replay()
    assert out.tolist() == [[1, 2], [9, 0]]


def test_a_kernel_is_one_call():
    def odd(x):
        return torch.tensor([float(v) for v in x.tolist() if v % 2], dtype=x.dtype)

    def double(x, *, out):
        out.copy_(torch.tensor([2 * v for v in x.tolist()]))

    x, out, graph = torch.tensor([1.0, 3.0]), torch.zeros(2), RecordedGraph()
    with graph.capturing():
        y = kernel(odd)(x)
        kernel(double, "out")(x, out=out)
    assert len(graph.calls) == 2 and y.isnan().all() and not out.any()
    x.copy_(torch.tensor([5.0, 7.0]))
    graph.replay()
    assert y.tolist() == [5, 7] and out.tolist() == [10, 14]
    assert kernel(odd)(torch.tensor([1.0, 2.0])).tolist() == [1]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: bool((x > 0).all()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: x.repeat_interleave(x.int()),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x + torch.tensor([1.0, 2.0]),
    ],
)
def test_values_do_not_pass_between_host_and_device(read):
    x, graph = torch.ones(2), RecordedGraph()
    read(x)
    with graph.capturing(), pytest.raises(Refused):
        read(x)
    assert RecordedGraph.current is None


def test_memory_of_the_host_may_be_read():
    word = torch.zeros(1, dtype=torch.int64)
    with RecordedGraph(host=[word]).capturing():
        assert int(word) == 0 and word.tolist() == [0]


def test_who_asks_is_told_that_a_capture_is_under_way():
    cpu, graph = torch.device("cpu"), RecordedGraph()
    assert not launcher.capturing(cpu)
    with pytest.raises(KeyError), graph.capturing():
        assert launcher.capturing(cpu)
        with pytest.raises(RuntimeError, match="while another one is"), graph.capturing():
            pass
        with pytest.raises(RuntimeError, match="inside a capture"):
            graph.replay()
        raise KeyError
    assert not launcher.capturing(cpu) and RecordedGraph.current is None
    assert torch.ones(2).tolist() == [1, 1]

"""Between GPUs the exchange is compiled at start-up: serving finds every kernel it launches."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import jit

from dcp.exchange_triton_kernel import exchange_kernel
from dcp.plan import Batch, Results, Scan
from dcp.runner import PeerExchange
from rocm_msa import launcher
from rocm_msa.vllm_plugin import decode_cp, kernels
from tests.comm import fake_peers
from tests.comm.ranks import run_threads
from tests.dcp.triton_cases import DIM, Case
from tests.ops import emulated_triton

MOST = Batch(70, 2, 90)  # at two ranks up to 64 blocks are sent as scores
TOPK = 16


@pytest.fixture
def kernels_made(monkeypatch):
    """Specialisations of the exchange's kernel by Triton's own rules; none is compiled or run."""

    def run(fn, *args, grid, warmup, **kwargs):
        emulated_triton.specialise(fn, args, kwargs, "gfx950", frozenset(["pages", "state"]))

    monkeypatch.setattr(exchange_kernel, "device_caches", {})
    monkeypatch.setattr(
        emulated_triton, "compile_triton", lambda fn, *args, **kwargs: (args, kwargs)
    )
    monkeypatch.setattr(jit.JITFunction, "run", run)
    monkeypatch.setattr(torch.version, "hip", "emulated")
    return lambda: [key for held in exchange_kernel.device_caches.values() for key in held[0]]


@pytest.fixture
def exchange():
    """Rank 1's end of a group of two."""

    def make(group):
        return PeerExchange(
            group, 4, max_rows=MOST.rows, max_blocks=MOST.max_blocks, device="cpu", topk=TOPK,
            head_dim=DIM, backend="triton", grid=2, runtime=fake_peers.runtime(),
        )  # fmt: skip

    made = run_threads(make, 2)
    yield made[1]
    for _ in range(2):
        run_threads(lambda group: made[group.rank].close(), 2)


def ending(exchange) -> decode_cp.DecodeCp:
    model = SimpleNamespace(topk_blocks=TOPK, init_blocks=0, local_blocks=1)
    serving = SimpleNamespace(model=model, options=SimpleNamespace(indexer_decode_cp_min_blocks=1))
    return decode_cp.DecodeCp(exchange, serving, Scan(9216, 2 * DIM, TOPK), MOST)


def step(requests: int, rows: int, blocks: int):
    """A decode batch as a step has it: rows of larger buffers."""
    words = {"dtype": torch.int32}
    table = torch.zeros(MOST.requests, MOST.max_blocks, **words)[:requests, :blocks]
    index_q = torch.zeros(MOST.rows, 2, DIM, dtype=torch.bfloat16)[: requests * rows]
    part = SimpleNamespace(
        block_table=table,
        seq_lens=torch.zeros(MOST.requests, **words)[:requests],
        rows_per_request=rows,
        num_blocks=torch.zeros(requests * rows, **words),
    )
    return index_q, part


def test_nothing_is_compiled_while_serving(kernels_made, exchange):
    cp, cache = ending(exchange), Case((700, 0, 129)).tensors[1]
    forms = {Results.SCORES, Results.CANDIDATES}
    assert len(kernels_made()) == 0
    prepared = cp.prepare(cache, torch.bfloat16)
    held = kernels_made()
    # Triton is given powers of two of requests, 16 at least, and two forms of the results.
    assert len(held) == len((16, 32, 64, 128)) * len(forms)
    assert prepared == len((1, 2, 4, 8, 16, 32, 64, 70)) * len(forms)
    for requests, rows, blocks in itertools.product(
        (1, 2, 3, 15, 16, 17, 33, 48, 64, 65, 70), (1, 2), (1, 2, 16, 64, 65, 90)
    ):
        index_q, part = step(requests, rows, blocks)
        assert cp.select(7, index_q, cache, part) is not None
    assert kernels_made() == held
    assert cp.select(7, *step(3, 1, 16)[:1], cache, step(3, 1, 16)[1]) is not None
    index_q, part = step(3, 1, 16)
    assert cp.select(7, index_q.half(), cache, part) is not None
    assert len(kernels_made()) == len(held) + 1  # the counter does see a kernel that is new


def test_a_batch_that_the_kernels_refuse_ends_the_preparation():
    class Refusing:
        shard = SimpleNamespace(rank=0, ranks=4, heads=4, heads_per_rank=1, slots=lambda n: n)
        seen = 0

        def prepare(self, index_q, *rest):
            if len(index_q) > 8:
                raise NotImplementedError
            self.seen += 1

    refusing, cache = Refusing(), Case((700,)).tensors[1]
    done = ending(refusing).prepare(cache, torch.bfloat16)
    assert done == refusing.seen == len((1, 2, 4)) * 2


@pytest.mark.parametrize(
    ("device", "shares", "prepared"), [("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0)]
)
def test_the_warm_up_prepares_it_once_for_all_layers(device, shares, prepared, monkeypatch, caplog):
    monkeypatch.setattr(kernels.logger, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, kernels.logger.name)
    monkeypatch.setattr(launcher, "active", lambda device: None)
    calls = []

    def prepare(*arguments):
        calls.append(arguments)
        return 12

    cp = SimpleNamespace(prepare=prepare) if shares else None
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=20000),
        scheduler_config=SimpleNamespace(max_num_seqs=100, max_num_batched_tokens=2048),
        speculative_config=None,
    )
    index = SimpleNamespace(pages=SimpleNamespace(device=torch.device(device)))
    layers = [
        SimpleNamespace(
            layer_name=name, sparse=name != "dense", decode_cp=cp, cache=index,
            index_cache=SimpleNamespace(layer_name=f"{name}.index", cache=index),
        )
        for name in ("dense", "a", "b")
    ]  # fmt: skip
    serving = SimpleNamespace(options=SimpleNamespace(backend="flydsl"))
    warm_up = kernels.WarmUp(serving, config, layers)
    for name in ("dense", "a", "a.index", "b", "b.index"):
        assert not calls
        warm_up.bound(name)
    assert calls == [(index, torch.bfloat16)] * prepared
    assert ("prepared for 12 sizes" in caplog.text) == bool(prepared)

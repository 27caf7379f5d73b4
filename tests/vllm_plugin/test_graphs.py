"""Recorded graphs of the tiny model's decode steps, as vLLM's runner V2 captures and replays them.

Every replay is compared with the same step without a graph, bit for bit: hidden states and each
byte of the caches. Layers, metadata and caches are the engine's, the ops are gfx950 kernels in the
emulator; what is recorded and what stands for a GPU's kernels is in graph_engine.py.

One engine lives at a time: tests with one of their own come before those that share `drafts`.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode

from mono_kernel.faults import MonoError, sum_site
from rocm_msa import launcher, ops
from rocm_msa.checkpoint.make import make_checkpoint
from rocm_msa.ops import dispatch, flydsl_host
from rocm_msa.vllm_plugin import attention, graphs, mono
from rocm_msa.vllm_plugin.metadata import MsaMetadataBuilder
from tests.ops import emulated_triton
from tests.vllm_plugin.engine import NGRAM, engine
from tests.vllm_plugin.graph_engine import (
    BATCHES,
    BLOCK,
    Request,
    Served,
    Steps,
    check_step,
    runner_of,
)
from tests.vllm_plugin.recorded_graph import RecordedGraph

OPTIONS = {"dtype": "bfloat16", "num_gpu_blocks_override": 64, "max_num_seqs": 5}


@contextlib.contextmanager
def serving(checkpoint: str, rows: int, sizes, **options):
    """An engine on the emulator, whose graphs of these sizes may be captured."""
    more = {"speculative_config": NGRAM} if rows > 1 else {}
    options = {"additional_config": {"rocm_msa": {"backend": dispatch.EMULATED, **options}}}
    with engine(checkpoint, **OPTIONS, **more, **options) as llm:
        served = Served(Steps(runner_of(llm), sizes, rows), rows, {})
        served.begin()
        try:
            yield served
        finally:
            launcher._offered.pop(dispatch.EMULATED, None)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("graphs") / "mxfp4"
    make_checkpoint(path, "tiny", "mxfp4", intermediate_size=256)
    return str(path)


@pytest.fixture(scope="module")
def drafts(quantised):
    """Mono layers, four rows a request: up to 16 rows, ordinary layers beyond."""
    with serving(quantised, 4, (20, 16, 8, 4), mono=True) as served:
        before = [pages.clone() for pages in served.steps.caches()]
        steps, taken = mono.steps.copy(), dispatch.taken.copy()
        runner = served.steps.model.model.mono.runner
        generation = runner.generation
        served.steps.capture()
        served.captured = {
            "untouched": [
                torch.equal(a, b) for a, b in zip(before, served.steps.caches(), strict=True)
            ],
            "steps": mono.steps - steps,
            "taken": dispatch.taken - taken,
            "launches": runner.generation - generation,
        }
        yield served


@pytest.mark.timeout(600)
def test_replays_of_the_ordinary_layers(checkpoint):
    with serving(checkpoint, 1, (5, 4, 2, 1)) as served:
        served.steps.capture()
        assert served.steps.graphs == [(5, 5), (4, 4), (2, 2), (1, 1)]
        for names in BATCHES:
            check_step(served.steps, served.batch(names))


@pytest.mark.timeout(600)
def test_replays_of_triton_kernels(checkpoint):
    """What runs on GPUs without compiled kernels, dense layers too; their code for gfx950."""
    with (
        serving(checkpoint, 1, (4, 2), backend="triton") as served,
        emulated_triton.emulated() as launches,
    ):
        served.steps.capture()
        at_capture = len(launches)
        for names in ("abcd", "bad", "ec"):
            check_step(served.steps, served.batch(names))
    each = at_capture // 2  # of the warm-ups: captures launch nothing
    assert len(launches) == at_capture + 3 * 3 * each and each > 8


def test_hidden_states_for_drafters_are_those_of_the_step(quantised):
    """EAGLE3's, of layers that are mono and that are not."""
    with serving(quantised, 1, (2,), mono=True) as served:
        served.steps.model.set_aux_hidden_state_layers((0, 1, 3))
        served.steps.capture()
        for names in ("ab", "c"):
            requests = served.batch(names)
            check_step(served.steps, requests)
            with served.steps.undone():
                assert served.steps.replayed(requests).shape == (len(names), 4 * 256)


def test_every_size_is_a_multiple_of_the_rows_of_a_request(quantised):
    """Sizes as users give them."""
    with serving(quantised, 4, (1, 2, 4, 8, 10, 16, 24)) as served:
        served.steps.capture()
        assert served.steps.graphs == [(4, 16), (3, 12), (2, 8), (1, 4)]


def scored_then_selected(monkeypatch) -> None:
    """Two launches for the selection, of which block_topk reads the counts of blocks."""
    fused = ops.select_decode
    monkeypatch.setattr(
        ops, "select_decode", lambda *args, counters, **options: fused(*args, **options)
    )


def fresh_counts(self, seq_lens, rows, _kept=MsaMetadataBuilder._decode_blocks):
    return _kept(self, seq_lens, rows).clone()


def narrow_capture(self, common):
    common.max_seq_len = BLOCK
    return self.build(0, common)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (None, None),
        ("_decode_blocks", fresh_counts),
        ("build_for_cudagraph_capture", narrow_capture),
    ],
)
def test_what_a_graph_would_freeze_is_noticed(name, change, checkpoint, monkeypatch):
    """Counts in a new tensor each step; a table as narrow as the dummy batch needs it."""
    scored_then_selected(monkeypatch)
    if name is not None:
        monkeypatch.setattr(MsaMetadataBuilder, name, change)
    with serving(checkpoint, 1, (2,)) as served:
        served.steps.capture()
        noticed = pytest.raises((AssertionError, IndexError))
        with contextlib.nullcontext() if name is None else noticed:
            check_step(served.steps, served.batch("ab"))


@pytest.mark.parametrize("rows", range(1, 18))
def test_padding_takes_no_step_beyond_the_rows_of_the_mono_layers(rows):
    """Sizes as vLLM rounds them, up to multiples of a request's rows."""
    drafts = SimpleNamespace(num_speculative_tokens=rows - 1) if rows > 1 else None
    for sizes in ([1, 2, 4, 8, 16, 24, 32, 512], [1, 2, 4], [64], []):
        compilation = SimpleNamespace(cudagraph_capture_sizes=list(sizes))
        graphs.add_size(
            SimpleNamespace(compilation_config=compilation, speculative_config=drafts), 16
        )
        new = compilation.cudagraph_capture_sizes
        assert new == sorted(new) and set(sizes) <= set(new) and len(new) <= len(sizes) + 1
        rounded = sorted({-(-size // rows) * rows for size in new})
        for live in range(rows, 17, rows):
            assert next((size for size in rounded if size >= live), 0) <= 16
    assert compilation.cudagraph_capture_sizes == []


def test_kernels_that_are_loaded_first_in_a_capture_are_refused(monkeypatch):
    monkeypatch.setattr(launcher, "_device_fault", lambda device: None)
    monkeypatch.setattr(launcher, "_active", {})
    words = r"loading compiled kernels onto cpu: first use: expected before the capture"
    with RecordedGraph().capturing(), pytest.raises(RuntimeError, match=words):
        launcher.fault(torch.device("cpu"))


def test_a_table_that_is_uploaded_first_in_a_capture_is_named():
    flydsl_host.lut_table.cache_clear()
    words = r"NVFP4 table of fold 0 on cpu: first use: expected before the capture"
    with RecordedGraph().capturing(), pytest.raises(RuntimeError, match=words):
        flydsl_host.lut_table(0, torch.device("cpu"))
    assert flydsl_host.lut_table(0, torch.device("cpu")).shape == (256, 8)


@pytest.mark.timeout(600)
def test_replays_of_mono_layers_and_of_more_rows_than_they_take(drafts):
    drafts.begin()
    assert drafts.steps.graphs == [(5, 20), (4, 16), (2, 8), (1, 4)]
    for names in BATCHES:
        check_step(drafts.steps, drafts.batch(names))
    assert drafts.lengths["b"] > 16 * BLOCK and drafts.lengths["d"] > 2 * BLOCK


def test_a_capture_leaves_caches_and_generations_alone(drafts):
    """Dummy batches write no slot; warm-ups launch on every rank alike, captures do not."""
    sparse, sizes = 3, 4
    captured = drafts.captured
    assert all(captured["untouched"])
    assert captured["launches"] == sparse * (sizes - 1)
    assert captured["steps"] == {("mono", "decode"): 2 * (sizes - 1), ("layers", "rows"): 2}
    # the dense layer always, the sparse ones in the size of 20 rows; warm-up and capture
    assert captured["taken"]["qkv_insert", "emulated"] == 2 * (sizes + sparse)
    assert captured["taken"]["sparse_decode", "emulated"] == 2 * sparse


def test_replays_are_counted_and_advance_the_generation(drafts, monkeypatch):
    monkeypatch.setattr(mono, "steps", Counter())
    monkeypatch.setattr(dispatch, "taken", Counter())
    drafts.begin()
    runner = drafts.steps.model.model.mono.runner
    for i, (names, wanted) in enumerate(
        [
            ("ab", {("mono", "decode"): 1}),
            ("abc", {("mono", "decode"): 2}),
            ("abcde", {("mono", "decode"): 2, ("layers", "rows"): 1}),
        ]
    ):
        before = runner.generation
        drafts.steps.replayed(drafts.batch(names))
        assert runner.generation == before + 3 * (i < 2)
        assert mono.steps == wanted
    assert dispatch.taken["sparse_decode", "emulated"] == 3
    assert dispatch.taken["dense_attention", "reference"] == 3


def test_a_fault_is_raised_before_the_next_replay(drafts):
    drafts.begin()
    requests = drafts.batch("ab")
    runner = drafts.steps.model.model.mono.runner
    before = runner.generation
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "mono_kernel.runner.decode", lambda word: MonoError(0, 1, sum_site("down"), 3)
        )
        with pytest.raises(MonoError, match=r"rank 0 waited in vain for rank 1"):
            drafts.steps.replayed(requests)
    assert runner.generation == before
    drafts.steps.replayed(requests)


@pytest.mark.parametrize(
    ("each", "graph"),
    [
        ([4, 4], (2, 8)),
        ([4, 4, 4], (4, 16)),  # 12 rows: the next size, never a smaller one
        ([4] * 5, (5, 20)),
        ([4, 4, 3], None),
        ([4, 2], None),  # 6 rows: drafts accepted in part
        ([1, 1], None),  # no drafts in the step
        ([3], None),
    ],
    ids=str,
)
def test_which_steps_have_a_graph(each, graph, drafts):
    """Sizes are multiples of 1 + drafts; whatever is not, runs without a graph."""
    found = drafts.steps.dispatched([Request([1], n, [3] * n) for n in each])
    if graph is None:
        assert found.cg_mode == CUDAGraphMode.NONE
    else:
        assert found.cg_mode == CUDAGraphMode.FULL
        assert (found.num_reqs, found.num_tokens) == graph


def test_caches_that_vllm_measures_graphs_on_are_not_announced(drafts, monkeypatch, caplog):
    """It makes a few blocks, captures on them, and takes them away before it counts blocks."""
    layer = drafts.steps.model.model.layers[0].self_attn
    monkeypatch.setattr(attention.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(attention.logger, "propagate", False)
    caplog.set_level(logging.INFO, attention.logger.name)
    layer.view(layer.kv_cache)
    assert caplog.text.count("capacity 8,192 tokens in 64 blocks") == 1
    monkeypatch.setattr(drafts.steps.config.cache_config, "num_gpu_blocks", None)
    layer.view(layer.kv_cache)
    assert caplog.text.count("capacity") == 1


def test_what_no_graph_would_refresh_is_refused(drafts):
    """A builder that had to copy, and steps with other rows than decode rows."""
    builder = drafts.steps.groups[0][0].get_metadata_builder(0)
    starts, lens = torch.tensor([0, 4, 8]).int(), torch.tensor([4, 4]).int()
    common = SimpleNamespace(
        num_reqs=2, num_actual_tokens=8, max_query_len=4, max_seq_len=2048,
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens,
        block_table_tensor=torch.zeros(2, 16).int(), is_prefilling=None,
    )  # fmt: skip
    assert builder.build_for_cudagraph_capture(common).decode.rows_per_request == 4
    for name in ("seq_lens", "query_start_loc", "block_table_tensor"):
        kept = getattr(common, name)
        setattr(common, name, kept.long())
        words = f"captured {name}.dtype: expected torch.int32, got torch.int64"
        with pytest.raises(RuntimeError, match=words):
            builder.build_for_cudagraph_capture(common)
        setattr(common, name, kept)
    common.query_start_loc = common.query_start_loc_cpu = torch.tensor([0, 4, 7]).int()
    common.num_actual_tokens = 7
    words = "captured step: expected decode rows alone, got queries of up to 4 tokens"
    with pytest.raises(RuntimeError, match=words):
        builder.build_for_cudagraph_capture(common)

"""The mono path in the plugin: which steps take it, its weights, faults and counters."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mono_kernel import reading
from mono_kernel.checkpoint_formats import LAYOUTS, formats_of_config, mono_layers
from mono_kernel.faults import MonoError, sum_site
from mono_kernel.plan import exchange_threshold
from mono_kernel.shapes import Shape
from rocm_msa import launcher
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.checkpoint.make import make_checkpoint
from rocm_msa.checkpoint.read import open_checkpoint
from rocm_msa.config import ModelConfig
from rocm_msa.errors import ConfigError
from rocm_msa.vllm_plugin import metrics, mono
from rocm_msa.vllm_plugin.metadata import MsaMetadata, Part
from rocm_msa.vllm_plugin.mono_loading import LayerCollector
from tests.ops.cases import int32

# tokens, requests, rows, most rows of a request, ragged, blocks -> what the step takes
SIZES = [
    ((1, 1, 1, 1, False, 1), ("mono", "decode")),
    ((16, 4, 16, 4, False, 64), ("mono", "decode")),
    ((16, 16, 16, 1, False, 64), ("mono", "decode")),
    ((17, 17, 17, 1, False, 64), ("layers", "rows")),
    ((20, 5, 20, 4, False, 64), ("layers", "rows")),
    ((5, 2, 5, 5, True, 64), ("mono", "ragged")),
    ((16, 1, 16, 16, True, 1), ("mono", "ragged")),
    ((17, 2, 17, 17, True, 64), ("layers", "prefill")),
    ((17, 2, 5, 5, True, 64), ("layers", "prefill")),
    ((300, 2, 300, 300, True, 65), ("layers", "prefill")),
    ((8, 3, 3, 1, False, 64), ("mono", "decode")),
    ((17, 3, 3, 1, False, 64), ("layers", "rows")),
    ((8, 17, 8, 1, False, 64), ("layers", "rows")),
    ((1, 1, 1, 1, False, 65), ("layers", "blocks")),
    ((5, 2, 5, 5, True, 65), ("layers", "blocks")),
    ((4, 0, 0, 0, False, 0), ("layers", "profile")),
    (None, ("layers", "profile")),
]


@pytest.mark.parametrize(("size", "path"), SIZES)
def test_the_path_of_a_step(size, path):
    assert mono.path_of(size and mono.StepSize(*size), 16, 64) == path


def test_long_contexts_share_the_scan_where_that_is_asked_for():
    size = mono.StepSize(4, 4, 4, 1, False, 40)
    assert mono.path_of(size, 16, 64, 41) == ("mono", "decode")
    assert mono.path_of(size, 16, 64, 40) == ("mono", "shared")
    ragged = mono.StepSize(4, 2, 4, 4, True, 40)
    assert mono.path_of(ragged, 16, 64, 41) == ("mono", "ragged")
    assert mono.path_of(ragged, 16, 64, 40) == ("mono", "shared")
    assert mono.path_of(mono.StepSize(17, 17, 17, 1, False, 40), 16, 64, 40)[0] == "layers"


def part(requests: int, rows: int, blocks: int = 3) -> Part:
    """Of a decode batch."""
    tokens = requests * rows
    return Part(
        slice(0, tokens),
        torch.zeros(requests, blocks + 4, dtype=torch.int32)[:, :blocks],  # as vLLM's: a view
        int32([128 * blocks] * requests),
        int32([*range(0, tokens + 1, rows)]),
        int32([blocks] * tokens),
        rows,
    )


def prefill(first: int, *rows: int, blocks: int = 3) -> Part:
    """Requests of so many rows each, from row `first` of the batch on."""
    starts = [0, *itertools.accumulate(rows)]
    return Part(
        slice(first, first + starts[-1]),
        torch.arange(10, 10 + len(rows) * blocks, dtype=torch.int32).view(-1, blocks),
        int32([100 * n for n in rows]),
        int32(starts),
        int32([blocks] * starts[-1]),
    )


def test_sizes_come_from_the_metadata():
    both = MsaMetadata(14, part(2, 4), prefill(8, 1, 5))
    assert mono.size_of(both, 16) == mono.StepSize(16, 4, 14, 14, True, 3)
    uniform = mono.StepSize(9, 2, 8, 4, False, 3)
    assert mono.size_of(MsaMetadata(8, part(2, 4), None), 9) == uniform
    alone = mono.StepSize(5, 1, 5, 5, True, 3)
    assert mono.size_of(MsaMetadata(5, None, prefill(0, 5)), 5) == alone
    assert mono.size_of(MsaMetadata(0, None, None), 4).requests == 0


POSITIONS = torch.arange(32)


class FakeRunner:
    """Remembers its launches; `error` is what it raises."""

    def __init__(self):
        self.launches, self.error = [], None

    def load(self, weights):
        return ("loaded", weights)

    def check(self):
        if self.error is not None:
            raise self.error

    def run(self, weights, caches, batch, hidden, residual, hidden_out, residual_out):
        self.check()
        self.launches.append((weights, caches, batch))
        hidden_out.copy_(hidden + 1)
        residual_out.copy_(residual + 10)


def attention(number: int):
    return SimpleNamespace(
        layer_name=f"{number}.attn",
        cache=f"main {number}",
        index_cache=SimpleNamespace(layer_name=f"{number}.index", cache=f"index {number}"),
        rotary_emb=SimpleNamespace(cos_sin_cache="cos_sin"),
    )


@pytest.fixture
def served(monkeypatch, caplog):
    """Layers 1 and 2 of three are mono layers; `context` is the step's forward context."""
    for name in ("steps", "faults"):
        monkeypatch.setattr(mono, name, mono.Counter())
    monkeypatch.setattr(mono.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(mono.logger, "propagate", False)
    caplog.set_level(logging.INFO, mono.logger.name)
    shape = Shape.of(MINIMAX_M3, 4, LAYOUTS["nvfp4"])
    made = mono.Mono(shape, FakeRunner(), {n: attention(n) for n in (1, 2)}, 8)
    for number in (1, 2):
        made.load(number, f"weights {number}")
    made.context = SimpleNamespace(attn_metadata=None, slot_mapping={})
    monkeypatch.setattr(mono, "get_forward_context", lambda: made.context)
    return made


def during(served, metadata: MsaMetadata) -> None:
    names = [f"{n}.{what}" for n in (1, 2) for what in ("attn", "index")]
    served.context.attn_metadata = dict.fromkeys(names, metadata)
    served.context.slot_mapping = {name: slots_of(name) for name in names}


def slots_of(name: str) -> torch.Tensor:
    """Longer than the step, as vLLM's may be."""
    return torch.arange(32) + 1000 * int(name[0]) + 100 * name.endswith("index")


def test_a_step_runs_the_mono_layers_and_leaves_the_others(served, caplog):
    during(served, MsaMetadata(4, part(2, 2), None))
    hidden = torch.ones(4, 8).bfloat16()
    step = served.begin(POSITIONS, hidden)
    assert step.layer(0) is None
    outs = step.layer(1)(POSITIONS, hidden, None)
    outs = step.layer(2)(POSITIONS, *outs)
    assert (outs[0] == 3).all() and (outs[1] == 20).all()  # the first layer had no residual
    for (weights, caches, batch), n in zip(served.runner.launches, (1, 2), strict=True):
        assert weights == ("loaded", f"weights {n}")
        assert caches == (f"main {n}", f"index {n}")
        assert torch.equal(batch.main_slots, slots_of(f"{n}.attn")[:4])
        assert torch.equal(batch.index_slots, slots_of(f"{n}.index")[:4])
        assert torch.equal(batch.positions, POSITIONS[:4])
        assert batch.rows == 4 and batch.block_table.is_contiguous()
        assert batch.block_table.shape == (2, 3)
        assert batch.cos_sin == "cos_sin"
    assert mono.steps == {("mono", "decode"): 1}
    assert caplog.text.count("step mono (decode)") == 1


def test_rows_behind_the_requests_are_padding(served):
    """Tensors longer than the batch: the rows behind it are neither read nor launched."""
    during(served, MsaMetadata(4, part(2, 2), None))
    hidden = torch.ones(9, 8).bfloat16()
    hidden[4:] = float("nan")
    hidden, residual = served.begin(POSITIONS, hidden).layer(1)(POSITIONS, hidden, hidden)
    assert (hidden[:4] == 2).all() and (residual[:4] == 11).all()
    assert hidden.shape == residual.shape == (9, 8)
    assert not hidden[4:].any() and not residual[4:].any()
    assert served.runner.launches[0][2].rows == 4


def test_a_step_of_requests_with_different_rows(served, caplog):
    """Both parts of the metadata are one batch, in which each request keeps its rows."""
    hidden = torch.ones(8, 8).bfloat16()
    during(served, MsaMetadata(8, part(2, 1), prefill(2, 4, 2)))
    served.begin(POSITIONS, hidden).layer(1)(POSITIONS, hidden, hidden)
    batch = served.runner.launches[0][2]
    assert (batch.rows, batch.most_rows) == (8, 8)
    assert batch.starts.tolist() == [0, 1, 2, 6, 8] and batch.starts.dtype == torch.int32
    assert batch.seq_lens.tolist() == [384, 384, 400, 200]
    assert batch.block_table.tolist() == [[0] * 3, [0] * 3, [10, 11, 12], [13, 14, 15]]
    during(served, MsaMetadata(6, None, prefill(0, 6)))
    served.begin(POSITIONS, hidden[:6]).layer(2)(POSITIONS, hidden[:6], hidden[:6])
    batch = served.runner.launches[1][2]
    assert (batch.rows, batch.starts.tolist()) == (6, [0, 6])
    assert torch.equal(batch.main_slots, slots_of("2.attn")[:6])
    assert mono.steps == {("mono", "ragged"): 2}
    assert caplog.text.count("step mono (ragged)") == 1


def test_steps_of_other_kinds_and_without_caches_take_the_layers(served, caplog):
    during(served, MsaMetadata(17, part(1, 1), prefill(1, 16)))
    for _ in range(2):
        assert served.begin(POSITIONS, torch.ones(17, 8)) is None
    served.context = SimpleNamespace(attn_metadata=None, slot_mapping=None)
    assert served.begin(POSITIONS, torch.ones(6, 8)) is None
    assert mono.steps == {("layers", "prefill"): 2, ("layers", "profile"): 1}
    assert caplog.text.count("layers (prefill)") == 1
    assert not served.runner.launches


def test_a_fault_is_raised_at_the_next_step_whatever_its_path_and_counted(served, monkeypatch):
    published = []
    monkeypatch.setattr(metrics, "publish", lambda: published.append(dict(mono.faults)))
    hidden = torch.ones(2, 8).bfloat16()
    during(served, MsaMetadata(2, part(2, 1), None))
    step = served.begin(POSITIONS, hidden)
    served.runner.error = MonoError(2, 3, sum_site("down"), 11)
    words = r"rank 2 waited in vain for rank 3 at the sum over ranks in phase down .generation 11."
    with pytest.raises(MonoError, match=words):
        step.layer(1)(POSITIONS, hidden, hidden)
    during(served, MsaMetadata(17, None, prefill(0, 17)))
    with pytest.raises(MonoError, match=words):
        served.begin(POSITIONS, hidden)
    site = ("the sum over ranks in phase down",)
    assert published == [{site: 1}, {site: 2}]


def test_counters_are_exported():
    counts = {count.name: count for count in metrics.COUNTS}
    assert counts["mono_steps"].labels == ("path", "reason")
    assert counts["mono_steps"].source() is mono.steps
    assert counts["mono_faults"].labels == ("site",)
    assert counts["mono_faults"].source() is mono.faults


def test_two_runners_take_turns_by_the_length_of_the_context(served):
    """From the modelled threshold on, or from one that is set; a fault of either is raised."""
    served.sharing = other = FakeRunner()
    short, long = MsaMetadata(2, part(2, 1, 3), None), MsaMetadata(2, part(2, 1, 8), None)
    hidden = torch.ones(2, 8).bfloat16()

    def runs(metadata):
        during(served, metadata)
        served.begin(POSITIONS, hidden).layer(1)(POSITIONS, hidden, hidden)
        return len(served.runner.launches), len(other.launches)

    assert exchange_threshold(served.shape, 2, 2) > 8
    assert [runs(short), runs(long)] == [(1, 0), (2, 0)]
    served.min_blocks = 8
    assert [runs(short), runs(long)] == [(3, 0), (3, 1)]
    assert mono.steps == {("mono", "decode"): 3, ("mono", "shared"): 1}
    other.error = MonoError(0, 1, sum_site("output"), 5)
    with pytest.raises(MonoError, match="for rank 1"):
        runs(short)


# Start-up


def serving(shape: Shape | None, decode_cp: bool = False):
    options = SimpleNamespace(backend=None, indexer_decode_cp_min_blocks=None)
    return SimpleNamespace(mono=shape, model=MINIMAX_M3, decode_cp=decode_cp, options=options)


def test_without_the_flag_there_is_nothing():
    assert mono.start(serving(None), None, []) is None
    assert mono.collector(None, None, None, None) is None


@pytest.mark.parametrize("fault", [None, "no gfx950", "lacks"])
def test_gpus_have_a_runner_over_peer_memory_when_the_kernel_is_there(monkeypatch, fault):
    from mono_kernel import runner

    made = []
    monkeypatch.setattr(runner, "MonoRunner", lambda *a, **o: made.append((a, o)) or FakeRunner())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(mono, "get_tp_group", lambda: SimpleNamespace(cpu_group="ranks"))
    monkeypatch.setattr(launcher, "fault", lambda device: fault if fault != "lacks" else None)
    missing = lambda builds: [b.symbol for b in builds] if fault == "lacks" else []  # noqa: E731
    monkeypatch.setattr(launcher, "active", lambda device: SimpleNamespace(missing=missing))
    shape = Shape.of(MINIMAX_M3, 4, LAYOUTS["nvfp4"])
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=20000),
        device_config=SimpleNamespace(device_type="cuda"),
    )
    layers = [attention(n) for n in range(60)]
    if fault is not None:
        words = "no gfx950" if fault == "no gfx950" else "not compiled: mono_layer_tp4_h6144"
        with pytest.raises(RuntimeError, match=f"mono: {words}.*to build it: .*--mono config"):
            mono.start(serving(shape), vllm_config, layers)
        return
    started = mono.start(serving(shape), vllm_config, layers)
    assert list(started.layers) == list(range(3, 60)) and started.most_blocks == 157
    device = torch.device("cuda", 1)
    options = {"max_blocks": 157, "device": device, "patience_ms": 20_000}
    assert made == [(("ranks", shape), options)] and started.sharing is None
    made.clear()
    started = mono.start(serving(shape, decode_cp=True), vllm_config, layers)
    assert made == [(("ranks", s), options) for s in (shape, shape.sharing())]
    assert started.sharing is not None and shape.sharing().exchange
    made.clear()
    one = Shape.of(MINIMAX_M3, 1, LAYOUTS["nvfp4"])  # nobody to share with
    assert mono.start(serving(one, decode_cp=True), vllm_config, layers).sharing is None
    assert made == [(("ranks", one), options)]


# Weights


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """(model, config, every tensor) of a quantised checkpoint, NVFP4 experts among MXFP8."""
    folder = tmp_path_factory.mktemp("stored") / "nvfp4"
    make_checkpoint(folder, "tiny", "nvfp4", intermediate_size=256)
    found = open_checkpoint(folder)
    return ModelConfig.from_json(folder), dict(found.config), [(n, t.clone()) for n, t in found]


def collecting(stored, rank: int = 1, tp: int = 2):
    model, config, _ = stored
    taken = {}
    fake = SimpleNamespace(layers=dict.fromkeys(mono_layers(model)), load=taken.__setitem__)
    shape = Shape.of(model, tp, formats_of_config(config, model))
    return LayerCollector(fake, shape, rank, config), taken


def test_layers_are_taken_as_soon_as_they_are_whole_and_dropped(stored):
    model, _, tensors = stored
    collector, taken = collecting(stored)
    wanted = {
        n: reading.read_layer(collector.shape, 1, dict(tensors), f"model.layers.{n}").packed()
        for n in mono_layers(model)
    }
    shuffled = [tensors[i] for i in torch.randperm(len(tensors)).tolist()]
    passed = []
    for name, tensor in collector.watch(shuffled):
        passed.append((name, tensor))
        assert len(taken) + len(collector.kept) <= len(wanted)
        if len(passed) % 2:
            tensor = tensor.clone()
    assert all(a[1] is b[1] for a, b in zip(passed, shuffled, strict=True))
    collector.finish()
    assert not collector.kept and sorted(taken) == list(mono_layers(model))
    for number, weights in taken.items():
        assert torch.equal(weights.packed(), wanted[number])


def test_a_tensor_that_is_used_again_does_no_harm(stored):
    """Loaders may hand out the same memory for every tensor."""
    model, _, tensors = stored
    clean, reused = collecting(stored), collecting(stored)
    list(clean[0].watch(tensors))
    for name, tensor in tensors:
        lent = tensor.clone()
        list(reused[0].watch([(name, lent)]))
        lent.view(torch.uint8).fill_(0xAA) if lent.dim() else lent.fill_(7)
    for number in mono_layers(model):
        assert torch.equal(clean[1][number].packed(), reused[1][number].packed())


def test_layers_that_are_not_whole_or_do_not_fit_are_named(stored):
    _, _, tensors = stored
    gone = "model.layers.2.block_sparse_moe.experts.3.w2.weight"
    collector, taken = collecting(stored)
    list(collector.watch((n, t) for n, t in tensors if n != gone))
    assert sorted(taken) == [1, 3]
    with pytest.raises(ConfigError, match=f"{gone}: expected nvfp4 .* got nothing"):
        collector.finish()
    collector, _ = collecting(stored)
    bad = [(n, t[:-16] if n == gone else t) for n, t in tensors]
    with pytest.raises(ConfigError, match=gone):
        list(collector.watch(bad))


def test_scales_may_be_called_by_either_name(stored):
    _, _, tensors = stored
    other = [(n.replace("weight_scale_inv", "weight_scale"), t) for n, t in tensors]
    assert other != tensors
    collector, taken = collecting(stored)
    list(collector.watch(other))
    assert len(taken) == 3 and not collector.kept


def test_bytes_of_the_public_geometry(capsys):
    """What a second copy of the weights costs a rank at TP 4, as docs/mono.md says."""
    from mono_kernel.weights import weight_layout

    gb = {
        layout: 57 * weight_layout(Shape.of(MINIMAX_M3, 4, formats)).nbytes / 1e9
        for layout, formats in LAYOUTS.items()
    }
    text = (Path(__file__).resolve().parents[2] / "docs" / "mono.md").read_text()
    for layout, size in gb.items():
        assert f"| {layout} | {size:.1f} GB |" in text

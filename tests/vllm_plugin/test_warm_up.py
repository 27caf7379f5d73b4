"""What Triton will run is compiled when the last cache has its memory, with the engine's sizes."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from rocm_msa import launcher
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.ops import triton_warmup
from rocm_msa.vllm_plugin import kernels
from rocm_msa.vllm_plugin.attention import CacheLayer, MsaAttention
from rocm_msa.vllm_plugin.verify import Options, Serving

CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=20000),
    scheduler_config=SimpleNamespace(max_num_seqs=100, max_num_batched_tokens=2048),
    speculative_config=SimpleNamespace(num_speculative_tokens=3),
)


def layer(name: str, sparse: bool, device: str = "cuda"):
    cache = SimpleNamespace(pages=SimpleNamespace(device=torch.device(device)), name=name)
    index = SimpleNamespace(layer_name=f"{name}.index", cache=f"{name}.index cache")
    return SimpleNamespace(
        layer_name=name, sparse=sparse, heads=f"{name} heads", cache=cache, index_cache=index,
        decode_cp=None,
    )  # fmt: skip


@pytest.fixture
def warmed(monkeypatch):
    """Calls of triton_warmup.warmup: (config, main cache's name, index cache)."""
    calls = []

    def warmup(config, main_cache, index_cache):
        calls.append((config, main_cache.name, index_cache))
        return 7

    monkeypatch.setattr(triton_warmup, "warmup", warmup)
    monkeypatch.setattr(launcher, "active", lambda device: None)
    return calls


@pytest.fixture
def tables(monkeypatch) -> list:
    """Caches whose NVFP4 table was asked for, main caches by their names."""
    asked = []
    monkeypatch.setattr(kernels, "scales_and_table", lambda cache, device: asked.append(cache.name))
    monkeypatch.setattr(kernels, "keys_of", asked.append)
    return asked


def bind_all(layers, backend=None, config=CONFIG) -> kernels.WarmUp:
    nvfp4 = CacheDType.NVFP4
    serving = Serving(MINIMAX_M3, MINIMAX_M3.shard(4), nvfp4, nvfp4, Options(backend))
    warm_up = kernels.WarmUp(serving, config, layers)
    bind(warm_up, layers)
    return warm_up


def bind(warm_up, layers) -> None:
    for one in layers:
        if one.sparse:
            warm_up.bound(one.index_cache.layer_name)
        warm_up.bound(one.layer_name)


@pytest.mark.parametrize("backend", [None, "triton"])
def test_one_layer_of_each_kind_with_the_sizes_of_serving(warmed, backend, monkeypatch, caplog):
    monkeypatch.setattr(kernels.logger, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, kernels.logger.name)
    bind_all([layer("a", False), layer("b", True), layer("c", True)], backend)
    (dense, *of_dense), (sparse, *of_sparse) = warmed
    assert of_dense == ["a", None] and of_sparse == ["c", "c.index cache"]
    assert (dense.heads, sparse.heads) == ("a heads", "c heads")
    for config in (dense, sparse):
        assert config.decode == [(n, r) for n in (1, 32, 100) for r in (1, 4)]
        assert config.prefill == [1, 16, 1024, 2048] and config.max_blocks == 157
        assert (config.topk, config.init_blocks, config.local_blocks) == (16, 0, 1)
        assert config.dtype is torch.bfloat16
    assert "7 Triton kernels compiled for the dense layers" in caplog.text


def test_only_when_all_are_bound_and_only_once(warmed):
    layers = [layer("a", True), layer("b", True)]
    nvfp4 = CacheDType.NVFP4
    serving = Serving(MINIMAX_M3, MINIMAX_M3.shard(4), nvfp4, nvfp4, Options())
    warm_up = kernels.WarmUp(serving, CONFIG, layers)
    for name in ("a", "b", "a.index", "a", "elsewhere"):
        warm_up.bound(name)
        assert not warmed
    for _ in range(2):
        warm_up.bound("b.index")
        assert len(warmed) == 1


@pytest.mark.parametrize(
    ("layers", "backend"),
    [
        ([layer("a", True, "cpu")], None),
        ([layer("a", True)], "reference"),
        ([layer("a", True)], "flydsl"),
        ([], None),
    ],
)
def test_where_triton_runs_nothing_nothing_is_compiled(warmed, layers, backend):
    bind_all(layers, backend)
    assert not warmed


def test_again_when_the_caches_were_taken_away_and_given_anew(warmed):
    """As vLLM does around the capture of graphs that it measures."""
    layers = [layer("a", True), layer("b", True)]
    warm_up = bind_all(layers)
    assert len(warmed) == 1
    warm_up.released("b")
    warm_up.bound("a")
    assert len(warmed) == 1
    warm_up.bound("b")
    assert len(warmed) == 2


@pytest.mark.parametrize(
    ("backend", "loaded", "uploads"),
    [
        (None, True, True),
        ("flydsl", True, True),
        ("emulated", False, True),
        (None, False, False),
        ("triton", True, False),
        ("reference", True, False),
    ],
)
def test_tables_of_compiled_kernels_are_there_before_any_step(
    backend, loaded, uploads, warmed, tables, monkeypatch
):
    made = SimpleNamespace(missing=lambda builds: []) if loaded else None
    monkeypatch.setattr(launcher, "active", lambda device: made)
    warm_up = bind_all([layer("a", False), layer("b", True)], backend)
    wanted = ["a", "b", "b.index cache"] if uploads else []
    assert tables == wanted
    warm_up.bound("a")
    assert tables == wanted


def test_layers_with_compiled_kernels_are_left_out(warmed, tables, monkeypatch):
    layers = [layer("a", False), layer("b", True)]
    loaded = SimpleNamespace(missing=lambda builds: [])
    monkeypatch.setattr(launcher, "active", lambda device: loaded)
    bind_all(layers)
    assert [call[1] for call in warmed] == ["a"]
    loaded.missing = lambda builds: ["sparse_decode_x"]
    bind_all(layers)
    assert [call[1] for call in warmed[1:]] == ["a", "b"]
    loaded.missing = lambda builds: []
    bind_all(layers, "triton")
    assert [call[1] for call in warmed[3:]] == ["a", "b"]


def test_small_engines_warm_what_they_can_reach(warmed):
    config = SimpleNamespace(
        model_config=CONFIG.model_config,
        scheduler_config=SimpleNamespace(max_num_seqs=1, max_num_batched_tokens=12),
        speculative_config=None,
    )
    bind_all([layer("a", True)], config=config)
    assert warmed[0][0].decode == [(1, 1)] and warmed[0][0].prefill == [1, 12]


def test_a_layer_reports_its_cache_when_it_gets_one():
    class Layer(CacheLayer):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.layer_name, self.told = "a", []
            self.warm_up = SimpleNamespace(
                bound=self.told.append, released=lambda name: self.told.append(f"no {name}")
            )

        def view(self, kv_cache):
            return "view"

        def get_kv_cache_spec(self, vllm_config):
            return None

    one = Layer()
    one.kv_cache = torch.zeros(0)
    assert one.cache is None and one.told == ["no a"]
    one.kv_cache = torch.zeros(4)
    assert one.cache == "view" and one.told == ["no a", "a"]
    one.kv_cache = torch.zeros(0)
    assert one.cache is None and one.told == ["no a", "a", "no a"]


def test_layers_share_what_they_have_in_common():
    sparse = SimpleNamespace(sparse=True, index_cache=SimpleNamespace())
    MsaAttention.share(sparse, "exchange", "warm-up", "mono")
    assert (sparse.decode_cp, sparse.warm_up, sparse.mono) == ("exchange", "warm-up", "mono")
    assert sparse.index_cache.warm_up == "warm-up"
    dense = SimpleNamespace(sparse=False)
    MsaAttention.share(dense, None, "warm-up")
    assert (dense.decode_cp, dense.warm_up) == (None, "warm-up")

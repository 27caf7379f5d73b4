"""The connector's halves without engines: orders of the scheduler, located rows, metrics."""

from __future__ import annotations

import types

import prometheus_client
import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import RequestStatus

import rocm_msa.vllm_plugin as plugin
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.outer_block import OuterBlockRow
from rocm_msa.cache.pages import main_page
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.errors import ConfigError
from rocm_msa.vllm_plugin.nixl import CONNECTOR, stats
from rocm_msa.vllm_plugin.nixl.checks import identities
from rocm_msa.vllm_plugin.nixl.memory import draft_pages, locate
from rocm_msa.vllm_plugin.nixl.metrics import RowPromMetrics, RowStats
from rocm_msa.vllm_plugin.nixl.options import TransferOptions
from rocm_msa.vllm_plugin.nixl.reader import Remote
from rocm_msa.vllm_plugin.nixl.scheduler import RowScheduler
from tests.vllm_plugin.pd_ranks import MODEL

NVFP4 = CacheDType.NVFP4
KEPT = {"do_remote_decode": True}


def test_loadable_by_name_and_by_path():
    plugin.register()
    plugin.register()
    by_name = KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both")
    path = "rocm_msa.vllm_plugin.nixl"
    by_path = KVTransferConfig(
        kv_connector=CONNECTOR, kv_role="kv_both", kv_connector_module_path=path
    )
    found = {KVConnectorFactory.get_connector_class(c) for c in (by_name, by_path)}
    (connector,) = found
    assert connector.__name__ == CONNECTOR
    assert KVConnectorFactory.supports_hma_config(by_name)
    assert connector.get_required_kvcache_layout(None) == "BLHNC"


def test_several_block_tables_are_refused():
    plugin.register()
    connector = KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
    config = types.SimpleNamespace(
        kv_transfer_config=KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both")
    )
    caches = types.SimpleNamespace(kv_cache_groups=[1, 2])
    with pytest.raises(ConfigError, match=r"KV cache groups: expected one block table .* got 2"):
        connector(config, KVConnectorRole.WORKER, caches)
    assert connector.supports_sleep_mode(None) is False


class Asks:
    """Stands for the control client: notes what is asked."""

    timeout = 1.0

    def __init__(self):
        self.asked = []

    def ask(self, host, port, engine, op, courtesy=False, **fields):
        assert courtesy
        self.asked.append((op, fields))

    def close(self):
        pass


@pytest.fixture
def scheduler():
    config = types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(tensor_parallel_size=2, data_parallel_index=0)
    )
    made = RowScheduler(config, "me", TransferOptions(lease_seconds=86_400.0, debug_checks=True))
    made.client.close()
    made.client = Asks()
    yield made
    made.shutdown()


def request(tokens, params, **more):
    defaults = {
        "request_id": "r",
        "prompt_token_ids": list(range(tokens)),
        "num_prompt_tokens": tokens,
        "num_computed_tokens": tokens,
        "status": RequestStatus.FINISHED_LENGTH_CAPPED,
        "kv_transfer_params": params,
    }
    return types.SimpleNamespace(**(defaults | more))


def offered(blocks, **more):
    return {
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "remote_host": "h",
        "remote_port": 5,
        "remote_request_id": "q",
        "remote_block_ids": [blocks],
    } | more


def test_prefill_hands_over_and_frees_after_the_commits(scheduler):
    done = request(300, dict(KEPT))
    kept, params = scheduler.finished(done, [7, 8, 9])
    assert kept
    assert params["remote_block_ids"] == [[7, 8, 9]]
    assert (params["remote_num_tokens"], params["tp_size"]) == (300, 2)
    assert params["remote_engine_id"] == "me" and params["remote_request_id"] == "r"
    orders = scheduler.take_orders()
    assert orders.published == [([7, 8, 9], identities(list(range(300))))]
    assert not orders.released
    scheduler.leases.commit("r", "d", 0, 2)
    assert not scheduler.take_orders().released
    scheduler.leases.commit("r", "d", 1, 2)
    orders = scheduler.take_orders()
    assert (orders.released, orders.expired, orders.withdrawn) == ({"r"}, 0, [[7, 8, 9]])


@pytest.mark.parametrize(
    ("params", "status"),
    [
        (None, RequestStatus.FINISHED_LENGTH_CAPPED),
        ({}, RequestStatus.FINISHED_LENGTH_CAPPED),
        (dict(KEPT), RequestStatus.FINISHED_ABORTED),
        ({"do_remote_decode": False}, RequestStatus.FINISHED_STOPPED),
    ],
)
def test_nothing_is_kept_without_a_reason(scheduler, params, status):
    assert scheduler.finished(request(300, params, status=status), [1, 2, 3]) == (False, None)
    assert len(scheduler.leases) == 0


@pytest.mark.parametrize(
    ("tokens", "hit", "first", "count"), [(300, 0, 0, 3), (300, 256, 2, 1), (256, 128, 1, 1)]
)
def test_decode_loads_what_its_prefix_cache_lacks(scheduler, tokens, hit, first, count):
    blocks = [40, 41, 42][: -(-tokens // 128)]
    waiting = request(tokens, offered(blocks, remote_num_tokens=tokens))
    scheduler.on_new_request(waiting)
    assert len(scheduler._renewals) == 1
    assert scheduler.matched_tokens(waiting, hit) == (tokens - hit, True)
    # Not admitted at first: asked again, still offered.
    assert scheduler.matched_tokens(waiting, hit) == (tokens - hit, True)
    local = list(range(100, 100 + len(blocks) + 1))  # one more than the prompt takes
    scheduler.allocated(waiting, local, tokens - hit)
    (load,) = scheduler.take_orders().loads
    assert load.remote == Remote("p", "h", 5, "q")
    assert load.local_blocks == local[first : first + count]
    assert load.remote_blocks == blocks[first : first + count]
    assert load.identities == identities(list(range(tokens)))[first : first + count]
    # After a preemption the prompt is computed here.
    assert scheduler.matched_tokens(waiting, 0) == (0, False)
    scheduler.allocated(waiting, local, 0)
    assert not scheduler.take_orders().loads
    scheduler.loaded({"r"})
    assert len(scheduler._renewals) == 0


def test_a_full_local_hit_only_lets_go(scheduler):
    waiting = request(256, offered([4, 5]))
    scheduler.on_new_request(waiting)
    assert scheduler.matched_tokens(waiting, 256) == (0, False)
    scheduler.allocated(waiting, [1, 2], 0)
    orders = scheduler.take_orders()
    assert not orders.loads and orders.forgets == [Remote("p", "h", 5, "q")]
    assert len(scheduler._renewals) == 0


def test_an_abort_before_admission_cancels_the_lease(scheduler):
    waiting = request(256, offered([4, 5]), status=RequestStatus.FINISHED_ABORTED)
    scheduler.on_new_request(waiting)
    assert scheduler.finished(waiting, []) == (False, None)
    assert scheduler.client.asked == [("cancel", {"request": "q"})]
    assert len(scheduler._renewals) == 0


def test_an_abort_while_it_is_read_leaves_the_lease_to_the_read(scheduler):
    """vLLM ends the request, and a second one with its first parameters (a client that left)."""
    params = offered([4, 5])
    waiting, second = request(256, dict(params)), request(1, dict(params), request_id="http")
    scheduler.on_new_request(waiting)
    scheduler.allocated(waiting, [1, 2], 256)
    waiting.status = second.status = RequestStatus.FINISHED_ABORTED
    assert scheduler.finished(waiting, [1, 2]) == (False, None)
    scheduler.on_new_request(second)
    assert scheduler.finished(second, []) == (False, None)
    assert scheduler.client.asked == []
    assert list(scheduler._renewals._requests) == ["r"]
    scheduler.loaded({"r"})
    assert len(scheduler._renewals) == 0 and not scheduler._loading
    late = request(1, dict(params), status=RequestStatus.FINISHED_ABORTED)
    assert scheduler.finished(late, []) == (False, None)
    assert scheduler.client.asked == [("cancel", {"request": "q"})]


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_port", "remote_block_ids"])
def test_incomplete_offers_are_not_loaded(scheduler, missing):
    params = offered([4, 5])
    del params[missing]
    assert scheduler.matched_tokens(request(256, params), 0) == (0, False)
    assert params["do_remote_prefill"] is False


def test_no_more_is_loaded_than_is_offered(scheduler):
    assert scheduler.matched_tokens(request(500, offered([4, 5])), 0) == (256, True)
    fewer = request(500, offered([4, 5, 6, 7], remote_num_tokens=300))
    assert scheduler.matched_tokens(fewer, 128) == (172, True)


def views(order=None, blocks=6, pad=0, draft=0):
    """vLLM's views of a block-outermost allocation, by layer name."""
    row = OuterBlockRow.of(
        MODEL, MODEL.shard(2), NVFP4, NVFP4, draft=[main_page(2, 128, NVFP4)] * draft
    )
    stride = row.nbytes + pad
    data = torch.zeros(blocks * stride, dtype=torch.uint8)
    named, names = (
        {},
        {"main": "model.layers.{}.self_attn.attn", "draft": "draft_model.layers.{}.a"},
    )
    names["index"] = names["main"] + ".index_cache"
    pages = list(row.pages)
    offsets = [p.offset for p in pages] if order is None else order(pages)
    for page, offset in zip(pages, offsets, strict=True):
        shape = (blocks, page.page.kv_heads, 128, page.page.page_bytes // page.page.kv_heads // 128)
        inner = page.page.page_bytes // page.page.kv_heads
        named[names[page.kind].format(page.layer)] = torch.as_strided(
            data, shape, (stride, inner, shape[-1], 1), offset
        )
    return named, row, data


@pytest.mark.parametrize("pad", [0, 256])
@pytest.mark.parametrize("draft", [0, 2])
def test_rows_are_found_where_they_are_declared(pad, draft):
    named, row, data = views(pad=pad, draft=draft)
    shuffled = dict(sorted(named.items(), key=lambda item: item[0][::-1]))
    rows = locate(shuffled, 6, row)
    assert (rows.memory.base, rows.memory.blocks) == (data.data_ptr(), 6)
    assert rows.memory.stride == row.nbytes + pad
    rows.bytes[3, row.pages[2].offset] = 9
    assert named["model.layers.2.self_attn.attn"][3, 0, 0, 0] == 9
    base = OuterBlockRow.of(MODEL, MODEL.shard(2), NVFP4, NVFP4)
    page = main_page(2, 128, NVFP4)
    spec = types.SimpleNamespace(num_kv_heads=2, head_size=128, page_size_bytes=page.page_bytes)
    specs = dict.fromkeys(named, spec)
    assert draft_pages(named, specs, base) == (page,) * draft


def swapped(pages):
    offsets = [p.offset for p in pages]
    offsets[0], offsets[1] = offsets[1], offsets[0]
    return offsets


def test_other_places_are_refused():
    named, row, _ = views(order=swapped)
    with pytest.raises(ConfigError, match=r"offset of the main page of layer 0: expected 0, got"):
        locate(named, 6, row)
    named, row, _ = views()
    del named["model.layers.1.self_attn.attn.index_cache"]
    with pytest.raises(ConfigError, match=r"index page of layer 1: expected .* got no cache"):
        locate(named, 6, row)
    named["model.layers.1.self_attn.attn.index_cache"] = torch.zeros(6, 1, 128, 72)
    with pytest.raises(ConfigError, match="one for all layers"):
        locate(named, 6, row)
    with pytest.raises(ConfigError, match="no caches were given"):
        locate({}, 6, row)


def test_pages_layer_by_layer_are_refused():
    """Layout LBHNC, which a drafter may ask for: a block is not one run of bytes there."""
    named, row, _ = views()
    sizes = [view.numel() for view in named.values()]
    parts = torch.zeros(sum(sizes), dtype=torch.uint8).split(sizes)
    apart = {n: p.view(v.shape) for (n, v), p in zip(named.items(), parts, strict=True)}
    words = rf"block stride: expected one of >= {row.nbytes} bytes \(layout BLHNC\), got"
    with pytest.raises(ConfigError, match=words):
        locate(apart, 6, row)


def test_unknown_draft_pages_are_refused():
    named, _, _ = views(draft=1)
    base = OuterBlockRow.of(MODEL, MODEL.shard(2), NVFP4, NVFP4)
    spec = types.SimpleNamespace(num_kv_heads=2, head_size=128, page_size_bytes=77)
    with pytest.raises(ConfigError, match=r"draft_model.layers.0.a: expected .* got 77 bytes"):
        draft_pages(named, dict.fromkeys(named, spec), base)


def test_metrics_add_up():
    counts = stats.TransferCounts()
    counts.read(0.5, 1000, 3, 4)
    counts.add("failed_stale")
    total = RowStats(counts.take())
    assert stats.is_empty(counts.take())
    counts.read(0.25, 2000, 1, 4)
    counts.add("retries", 2)
    total.aggregate(RowStats(counts.take()))
    summary = total.reduce()
    assert (summary["KV reads"], summary["failed"], summary["retries"]) == (2, 1, 2)
    assert summary["descriptors a block"] == 0.5
    registry = prometheus_client.CollectorRegistry()

    def kind(cls):
        return type(cls.__name__, (), {"__new__": lambda _, **kw: cls(registry=registry, **kw)})

    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    config = types.SimpleNamespace(kv_transfer_config=None)
    metrics = RowPromMetrics(config, {k: kind(k) for k in kinds}, ["engine"], {0: ["0"]})
    metrics.observe(total.to_dict(), 0)
    metrics.observe(total.to_dict(), 0)

    def sample(name):
        return registry.get_sample_value(f"vllm:rocm_msa_kv_{name}", {"engine": "0"})

    assert sample("read_bytes_sum") == 6000
    assert sample("read_descriptors_count") == 4
    assert sample("failed_stale_total") == 2
    assert sample("retries_total") == 4
    assert sample("failed_check_total") == 0
    fresh = RowStats()
    assert fresh.is_empty()


def test_full_model_row_digest_is_the_same_for_both_engines():
    rows = [OuterBlockRow.of(MINIMAX_M3, MINIMAX_M3.shard(tp), NVFP4, NVFP4) for tp in (1, 4)]
    assert rows[0].digest == rows[1].digest

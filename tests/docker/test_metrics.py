"""What the workers count reaches Prometheus; dashboard and docs name what is exported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from rocm_msa.vllm_plugin import metrics
from tests.docker.image import DOCKER, ROOT
from tests.vllm_plugin.vllm_033 import sources

DASHBOARD = DOCKER / "grafana" / "rocm-msa.json"
DOCS = ROOT / "docs" / "metrics.md"
SUFFIXES = ("_total", "_bucket", "_sum", "_count", "_created")


def base(name: str) -> str:
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def transfer_names() -> set[str]:
    """Names of the KV connector's metrics, from the class that makes them."""
    from rocm_msa.vllm_plugin.nixl.metrics import RowPromMetrics

    names = set()

    class Fake:
        def __init__(self, name, **options):
            names.add(name)

        def labels(self, *values):
            return self

    from prometheus_client import Counter as PromCounter
    from prometheus_client import Gauge, Histogram

    types = dict.fromkeys((Gauge, PromCounter, Histogram), Fake)
    config = SimpleNamespace(kv_transfer_config=None)
    RowPromMetrics(config, types, ["engine"], {0: ["0"]})
    return names


def ours() -> set[str]:
    named = {f"rocm_msa_{metric.name}" for metric in (*metrics.COUNTS, *metrics.LEVELS)}
    return named | transfer_names()


def upstream(folder: Path) -> set[str]:
    """Names of vLLM's own metrics in its sources."""
    text = "".join(p.read_text() for p in (folder / "vllm").rglob("*.py") if "metric" in str(p))
    text += "".join(p.read_text() for p in (folder / "vllm/v1/spec_decode").glob("*.py"))
    return set(re.findall(r'"(vllm:\w+)"', text))


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def names_in(text: str) -> set[str]:
    return {base(name) for name in re.findall(r"\b(?:vllm:|rocm_msa_)[a-z]\w+", text)}


@pytest.fixture
def counted(monkeypatch):
    """A source of counts that a test fills, and fresh Prometheus counters in a registry."""
    from prometheus_client import CollectorRegistry
    from prometheus_client import Counter as PromCounter

    registry, source = CollectorRegistry(), Counter()
    count = metrics.Count("toy_calls", "Toy.", ("op", "why"), lambda: source)
    made = PromCounter("rocm_msa_toy_calls", "Toy.", count.labels, registry=registry)
    monkeypatch.setattr(metrics, "COUNTS", (count,))
    monkeypatch.setattr(metrics, "_published", {})
    monkeypatch.setattr(metrics, "_counter", lambda c: made)

    def value(*labels):
        return registry.get_sample_value(
            "rocm_msa_toy_calls_total", dict(zip(("op", "why"), labels, strict=True))
        )

    return source, value


def test_counts_are_published_once(counted):
    source, value = counted
    source["a", "x"] = 3
    metrics.publish()
    metrics.publish()
    assert value("a", "x") == 3
    source["a", "x"] += 2
    source["b", "y"] += 1
    metrics.publish()
    assert (value("a", "x"), value("b", "y")) == (5, 1)
    source.clear()  # counted anew from 0: what was published stays
    source["a", "x"] = 1
    metrics.publish()
    assert value("a", "x") == 5
    source["a", "x"] = 4
    metrics.publish()
    assert value("a", "x") == 8


def test_the_ops_count_with_their_reason():
    import torch

    from rocm_msa.ops import block_topk
    from tests.ops.cases import int32

    (count,) = [c for c in metrics.COUNTS if c.name == "op_calls"]
    key = ("block_topk", "reference", "asked for")
    before = count.source()[key]
    block_topk(torch.zeros(1, 1, 4), int32([4]), backend="reference")
    assert count.source()[key] == before + 1
    assert len(key) == len(count.labels)


def test_what_is_compiled_after_the_warm_up_is_late(monkeypatch):
    from prometheus_client import CollectorRegistry
    from prometheus_client import Counter as PromCounter

    compiled = {"number": 5}
    registry = CollectorRegistry()
    (late,) = [c for c in metrics.COUNTS if c.name == "compiles_while_serving"]
    made = PromCounter("late", "Late.", registry=registry)
    monkeypatch.setattr(metrics, "COUNTS", (late,))
    monkeypatch.setattr(metrics, "_published", {})
    monkeypatch.setattr(metrics, "_counter", lambda c: made)
    monkeypatch.setattr(metrics, "_compiled_in_warm_up", None)
    monkeypatch.setattr(metrics, "_triton_compiles", lambda: {(): compiled["number"]})
    assert late.source() == {}  # nothing is late while the engine starts
    metrics.serving_begins()
    metrics.publish()
    assert registry.get_sample_value("late_total") == 0
    compiled["number"] = 7
    metrics.publish()
    assert registry.get_sample_value("late_total") == 2
    monkeypatch.setattr(metrics, "_triton_compiles", dict)  # no Triton at all
    metrics.serving_begins()
    assert late.source() == {(): 0}


def test_worker_processes_share_a_folder(tmp_path):
    """prometheus_client sums the counters of all processes that have the variable."""
    code = (
        "import sys, os, torch\n"
        "from rocm_msa.ops import block_topk\n"
        "from rocm_msa.vllm_plugin import metrics\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    block_topk(torch.zeros(1, 1, 4), torch.tensor([4], dtype=torch.int32))\n"
        "metrics.publish()\n"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for calls in ("2", "3"):
        command = [sys.executable, "-c", code, calls]
        subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=300)
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    (metric,) = [m for m in registry.collect() if m.name == "rocm_msa_op_calls"]
    (sample,) = metric.samples
    assert sample.value == 5
    assert sample.labels["backend"] == "reference"


def test_the_dashboard_asks_for_what_exists():
    used = set().union(*(names_in(text) for text in expressions()))
    assert ours() <= used, f"not on the dashboard: {sorted(ours() - used)}"
    here = Path(__import__("vllm").__file__).parents[1]
    for folder in (here, sources()[1]):
        theirs = {base(name) for name in upstream(folder)}
        assert used <= ours() | theirs, sorted(used - ours() - theirs)


def test_the_dashboard_is_whole():
    data = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in data["panels"]]
    assert len(set(ids)) == len(ids)
    boxes = [panel["gridPos"] for panel in data["panels"]]
    cells = [
        (box["x"] + i, box["y"] + j)
        for box in boxes
        for i in range(box["w"])
        for j in range(box["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    for text in expressions():
        assert text.count("(") == text.count(")")


def test_the_docs_name_every_metric_and_no_other():
    named = {name for name in names_in(DOCS.read_text()) if "rocm_msa_" in name}
    assert named == ours()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_shows_them(tmp_path):
    """`rocm-msa serve`: counted in the engine's process, seen on the server's /metrics."""
    from rocm_msa.checkpoint.make import make_checkpoint
    from rocm_msa.cli.serve import command_line
    from rocm_msa.demo.server import Server, free_port, open_url

    make_checkpoint(tmp_path / "tiny")
    port = free_port()
    options = ["--port", str(port), "--block-size", "128", "--kv-cache-dtype", "nvfp4"]
    options += ["--max-model-len", "1024", "--attention-config", '{"indexer_kv_dtype": "nvfp4"}']
    settings = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = command_line(str(tmp_path / "tiny"), options)
    server = Server(command, port, tmp_path / "log", {**os.environ, **settings})
    wanted = ("rocm_msa_op_calls_total{", "rocm_msa_cache_blocks{", "vllm:cache_config_info{")
    wanted += ("\nrocm_msa_compiles_while_serving_total 0.0",)

    def read(path: str, body: dict | None = None) -> str:
        data = json.dumps(body).encode() if body else None
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(server.url + path, data, headers)
        with open_url(request, timeout=300) as answer:
            return answer.read().decode()

    try:
        server.start()
        server.wait_healthy(600, lambda seconds, line: None)
        read("/v1/completions", {"model": str(tmp_path / "tiny"), "prompt": "x", "max_tokens": 4})
        deadline = time.monotonic() + 120
        while True:
            text = read("/metrics")
            if all(name in text for name in wanted) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
    finally:
        server.stop()
    assert all(name in text for name in wanted), text[-3000:]
    assert 'backend="reference"' in text

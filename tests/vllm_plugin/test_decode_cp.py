"""indexer_decode_cp in the plugin: who takes it, what is refused, counted and checked; TP 2."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dcp.api import DcpError
from dcp.plan import Batch, Scan
from dcp.shard import Shard, Site
from rocm_msa import launcher
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.errors import Refusals
from rocm_msa.vllm_plugin import decode_cp
from rocm_msa.vllm_plugin.verify import Options, Serving
from tests.ops.cases import int32
from tests.vllm_plugin.run_decode_cp import ALONE
from tests.vllm_plugin.test_verify import config, refusal

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"attention_config": {"indexer_kv_dtype": "nvfp4", "indexer_decode_cp": True}}


class FakeExchange:
    """Remembers its calls. `error` is what check raises."""

    def __init__(self, ranks: int = 4):
        self.shard, self.calls, self.error, self.refuses = Shard(1, ranks, 4), [], None, False

    def select(self, *arguments, **options):
        if self.refuses:
            raise NotImplementedError("expected fewer rows")
        self.calls.append((arguments, options))
        return "ids"

    def check(self):
        if self.error is not None:
            raise self.error


def part(requests: int, rows: int, blocks: int):
    return SimpleNamespace(
        block_table=torch.zeros(requests, blocks, dtype=torch.int32),
        seq_lens=int32([128 * blocks] * requests),
        rows_per_request=rows,
        num_blocks=int32([blocks] * requests * rows),
    )


def hear(monkeypatch, caplog) -> None:
    """Let caplog have the plugin's lines once each, whatever vLLM did to its logger."""
    monkeypatch.setattr(decode_cp.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(decode_cp.logger, "propagate", False)
    caplog.set_level(logging.INFO, decode_cp.logger.name)


@pytest.fixture
def shared(monkeypatch, caplog):
    monkeypatch.setattr(decode_cp, "taken", decode_cp.Counter())
    monkeypatch.setattr(decode_cp, "faults", decode_cp.Counter())
    hear(monkeypatch, caplog)
    model = SimpleNamespace(topk_blocks=16, init_blocks=1, local_blocks=2)
    options = SimpleNamespace(indexer_decode_cp_min_blocks=None)
    serving = SimpleNamespace(model=model, options=options)
    return decode_cp.DecodeCp(FakeExchange(), serving, Scan(9216, 256), Batch(64, 4, 8192))


def test_long_batches_are_shared_short_ones_are_not(shared, caplog):
    long, short = part(45, 4, 227), part(45, 4, 226)
    assert shared.select(7, "q", "cache", long) == "ids"
    assert shared.select(7, "q", "cache", short) is None
    assert shared.select(8, "q", "cache", long) == "ids"
    (arguments, options), (_, again) = shared.exchange.calls
    assert arguments[:2] == ("q", "cache") and arguments[6:] == (16, 1, 2)
    assert arguments[2:6] == (long.block_table, long.seq_lens, 4, long.num_blocks)
    assert options == {"layer": 7} and again == {"layer": 8}
    assert decode_cp.taken == {("shared", "long"): 2, ("alone", "short"): 1}
    said = [r.message for r in caplog.records if "decode batch" in r.message]
    assert len(said) == 2
    assert (
        "shared (long): 45 requests x 4 rows of up to 227 blocks; the threshold is 227" in said[0]
    )
    assert "alone (short): 45 requests x 4 rows of up to 226 blocks" in said[1]


def test_a_threshold_of_ones_own(shared):
    shared.min_blocks = 3
    assert shared.select(0, "q", "cache", part(1, 1, 3)) == "ids"
    assert shared.select(0, "q", "cache", part(1, 1, 2)) is None


def test_batches_that_do_not_fit_or_are_not_supported_go_alone_and_say_why(shared, caplog):
    assert shared.select(0, "q", "cache", part(65, 4, 300)) is None
    assert shared.select(0, "q", "cache", part(1, 1, 8193)) is None
    shared.exchange.refuses = True
    assert shared.select(0, "q", "cache", part(64, 4, 8192)) is None
    assert decode_cp.taken == {("alone", "large"): 2, ("alone", "unsupported"): 1}
    assert "there is room for 256 rows of 8192 blocks" in caplog.text
    assert "alone (unsupported): 64 requests x 4 rows" in caplog.text
    assert "expected fewer rows" in caplog.text and not shared.exchange.calls


def test_the_error_is_looked_at_once_a_step_before_anything_else(shared, monkeypatch):
    from rocm_msa.vllm_plugin.metadata import MsaMetadataBuilder

    monkeypatch.setattr(MsaMetadataBuilder.__mro__[1], "__init__", lambda self, *a: None)
    monkeypatch.setattr(MsaMetadataBuilder, "_init_reorder_batch_threshold", lambda *a, **k: None)
    one = SimpleNamespace(decode_cp=shared, mono=None)
    layers = {"dense": object(), "a.attn": one, "b.attn": one}
    vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    builder = MsaMetadataBuilder(None, list(layers), vllm_config, "cpu")
    assert builder.checks == [shared]
    shared.exchange.error = DcpError(2, 3, Site.RESULTS, 11)
    with pytest.raises(
        DcpError, match=r"rank 2: the results of rank 3 did not come .*generation 11"
    ):
        builder.build(0, None)
    assert MsaMetadataBuilder(None, ["dense"], vllm_config, "cpu").checks == []


def test_faults_are_counted_and_published_before_the_engine_ends(shared, monkeypatch):
    published = []

    def publish():
        published.append(dict(decode_cp.faults))

    monkeypatch.setattr(decode_cp.metrics, "publish", publish)
    shared.exchange.error = DcpError(2, 3, Site.RESULTS, 11)
    with pytest.raises(DcpError):
        shared.check()

    def fails(*arguments, **options):
        raise DcpError(0, 1, Site.START, 12)

    monkeypatch.setattr(shared.exchange, "select", fails)
    with pytest.raises(DcpError):
        shared.select(0, "q", "cache", part(64, 4, 8192))
    both = {("RESULTS",): 1, ("START",): 1}
    assert decode_cp.faults == both and published == [{("RESULTS",): 1}, both]
    (count,) = [c for c in decode_cp.metrics.COUNTS if c.name == "decode_cp_faults"]
    assert count.source() == both and count.labels == ("site",)


def test_one_rank_has_nothing_to_share(monkeypatch, caplog):
    hear(monkeypatch, caplog)
    serving = SimpleNamespace(decode_cp=True, rank=SimpleNamespace(tp=1))
    assert decode_cp.start(serving, None) is None
    assert "no effect with one tensor-parallel rank" in caplog.text
    serving = SimpleNamespace(decode_cp=False, rank=SimpleNamespace(tp=4))
    assert decode_cp.start(serving, None) is None


@pytest.mark.parametrize("tp", [1, 2])
def test_both_ways_to_ask_are_accepted(checkpoint, tp):
    from rocm_msa.vllm_plugin.verify import resolve

    asked = {"indexer_decode_cp": True, "indexer_decode_cp_min_blocks": 7}
    ways = [OPTIONS, {"additional_config": {"rocm_msa": asked}}]
    resolved = [resolve(config(checkpoint, tensor_parallel_size=tp, **way)) for way in ways]
    assert [r.decode_cp for r in resolved] == [True, True]
    assert [r.options.indexer_decode_cp_min_blocks for r in resolved] == [None, 7]
    assert not resolve(config(checkpoint, tensor_parallel_size=tp)).decode_cp


def test_refused(checkpoint):
    both = OPTIONS | {"tensor_parallel_size": 2, "data_parallel_size": 2}
    message = refusal(checkpoint, **both)
    assert "indexer_decode_cp: not tested with data parallelism" in message
    for bad, words in ((0, "expected >= 1, got 0"), (True, "an int"), ("8", "an int")):
        asked = {"indexer_decode_cp_min_blocks": bad}
        message = refusal(checkpoint, additional_config={"rocm_msa": asked})
        assert "additional_config.rocm_msa.indexer_decode_cp_min_blocks" in message
        assert words in message


def gpu_config(dtype=torch.bfloat16, nnodes=1, tp=4):
    return SimpleNamespace(
        attention_config=SimpleNamespace(indexer_decode_cp=True),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, data_parallel_size=1, nnodes=nnodes
        ),
        device_config=SimpleNamespace(device_type="cuda"),
        model_config=SimpleNamespace(dtype=dtype, max_model_len=20000),
        scheduler_config=SimpleNamespace(max_num_seqs=48),
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
    )


@pytest.mark.parametrize(
    ("change", "index", "backend", "words"),
    [
        ({}, "nvfp4", None, None),
        ({"dtype": torch.float16}, "fp8", "triton", None),
        ({"nnodes": 2, "tp": 1, "dtype": torch.float32}, "bf16", "reference", None),
        ({"nnodes": 2}, "nvfp4", None, "one host; --nnodes: expected 1, got 2"),
        ({"dtype": torch.float32}, "nvfp4", None, "--dtype with nvfp4 index keys"),
        ({"dtype": torch.float16}, "bf16", None, "--dtype with bf16 index keys"),
        ({}, "nvfp4", "reference", "no exchange between GPUs"),
    ],
)
def test_refused_between_gpus(change, index, backend, words):
    refusals = Refusals("no")
    options = Options(backend=backend)
    decode_cp.check_config(gpu_config(**change), options, CacheDType.parse(index), refusals)
    assert len(refusals.reasons) == (words is not None)
    assert words is None or words in refusals.reasons[0]


def test_gpus_exchange_through_memory_sized_for_the_largest_batch(monkeypatch):
    from vllm.distributed import parallel_state

    from dcp import runner

    made = []

    def peer_exchange(group, heads, **options):
        made.append((group, heads, options))
        return FakeExchange()

    monkeypatch.setattr(runner, "PeerExchange", peer_exchange)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(cpu_group="ranks"))
    serving = Serving(
        MINIMAX_M3, MINIMAX_M3.shard(4), CacheDType.NVFP4, CacheDType.FP8, Options("triton"), True
    )
    started = decode_cp.start(serving, gpu_config())
    assert started.scan == Scan(16384, 256, 16) and started.most == Batch(48, 4, 157)
    wanted = {
        "max_rows": 192, "max_blocks": 157, "device": torch.device("cuda", 2), "topk": 16,
        "head_dim": 128, "backend": "triton", "patience_ms": 10_000,
    }  # fmt: skip
    assert made == [("ranks", 4, wanted)]


@pytest.mark.parametrize(
    ("asked", "fault", "lacks", "backend", "words"),
    [
        (None, None, [], "flydsl", "backend flydsl (preferred)"),
        (None, None, ["dcp_exchange_x"], "triton", "triton (not compiled: dcp_exchange_x)"),
        (None, "no gfx950", [], "triton", "triton (no gfx950)"),
        ("triton", None, [], "triton", "triton (asked for)"),
        ("flydsl", None, [], "flydsl", "flydsl (asked for)"),
        ("flydsl", None, ["dcp_exchange_x"], None, "backend flydsl: not compiled: dcp_exchange_x"),
        ("flydsl", "no gfx950", [], None, "backend flydsl: no gfx950"),
    ],
)
def test_compiled_kernels_are_preferred(monkeypatch, caplog, asked, fault, lacks, backend, words):
    hear(monkeypatch, caplog)
    needed = []

    def missing(builds):
        needed.extend(builds)
        return lacks

    monkeypatch.setattr(launcher, "fault", lambda device: fault)
    monkeypatch.setattr(launcher, "active", lambda device: SimpleNamespace(missing=missing))
    serving = Serving(
        MINIMAX_M3, MINIMAX_M3.shard(4), CacheDType.NVFP4, CacheDType.FP8, Options(asked), True
    )
    arguments = (serving, torch.bfloat16, torch.device("cuda", 0))
    if backend is None:
        with pytest.raises(RuntimeError, match=words):
            decode_cp._gpu_backend(*arguments)
    else:
        assert decode_cp._gpu_backend(*arguments) == backend
        assert words in caplog.text
    looked_at = fault is None and asked != "triton"
    assert {(b.ranks, b.heads, b.kind, b.query, b.topk) for b in needed} == (
        {(4, 4, "fp8", "bf16", 16)} if looked_at else set()
    )


def run_engine(
    tmp_path: Path,
    checkpoint: str,
    case: dict,
    script: str = "run_decode_cp.py",
    **environment: str,
):
    """What a script made of the case: the finished process, with rounds in `out.pt`."""
    (tmp_path / "case.json").write_text(json.dumps(case))
    arguments = [checkpoint, str(tmp_path / "out.pt"), str(tmp_path / "case.json")]
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        # The engine's loop in this process, so that all prompts are there before its first step
        # and two runs have the same batches; functions are sent to the workers.
        env=os.environ
        | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            "PYTHONPATH": str(ROOT),
        }
        | environment,
        capture_output=True,
        text=True,
        timeout=1100,
    )


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 900, (length,), generator=generator).tolist()


def same(one: list, other: list) -> bool:
    """Whether two rounds gave the same tokens and the same log-probabilities, bit for bit."""
    return len(one) == len(other) > 0 and all(
        a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.timeout(1200)
def test_two_ranks_answer_the_same_shared_and_alone(checkpoint, tmp_path):
    """2,600 tokens are 21 blocks, of which 16 are selected."""
    case = {
        "options": OPTIONS | {"enable_prefix_caching": False},
        "prompts": [prompt(2600, 0), prompt(300, 1)],
        "count": 6,
        "rounds": [1, ALONE, None],
    }
    done = run_engine(tmp_path, checkpoint, case)
    assert done.returncode == 0, done.stderr[-3000:]
    on, off, left = torch.load(tmp_path / "out.pt")
    assert on["counts"] == [{"shared long": 15}] * 2  # three sparse layers, five steps
    assert off["counts"] == left["counts"] == [{"alone short": 15}] * 2
    assert same(on["answers"], off["answers"]) and same(off["answers"], left["answers"])

"""Prefill/decode pairs that start anew for each question: dtypes, TP, the stock connector, faults.

Everything real: two vLLM servers, NIXL, killed processes. Minutes on two cores.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from rocm_msa.demo.pair import ROWS, STOCK, settled, transfers
from rocm_msa.demo.prepare import SERVED_NAME
from tests.vllm_plugin.pd_pair import (
    EXPIRED,
    ROOT,
    USAGE,
    at_once,
    failures,
    ids,
    pair,
    post,
    prompt_of,
    status_of,
    wait_for,
)

pytest.importorskip("nixl", reason="NIXL is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PATIENT = {"lease_seconds": 600.0, "control_timeout_seconds": 120.0, "read_timeout_seconds": 600.0}
DEBUG = PATIENT | {"debug_checks": True}


def threads(server) -> int:
    return sum(p.num_threads() for p in server.processes() if isinstance(p, psutil.Process))


@pytest.mark.parametrize(
    ("main", "index", "page_bytes"),
    [("fp8", "fp8", 4 * 65_536 + 3 * 16_384), ("bf16", "bf16", 4 * 131_072 + 3 * 32_768)],
)
def test_other_dtypes_with_debug_checks(checkpoint, tmp_path, main, index, page_bytes):
    debug = {"extra": DEBUG}
    with pair(checkpoint, tmp_path, main=main, index=index, prefill=debug, decode=debug) as engines:
        for length in (1, 128, 129, 2500):
            prompt = prompt_of(length)
            assert engines.through(prompt) == engines.alone(prompt)
        read = settled(engines.decode, engines.connector, 4)
        assert read.nbytes == (1 + 1 + 2 + 20) * page_bytes
        assert read.descriptors <= 24
        assert failures(engines.decode) == {}


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (1, 2), (2, 1)])
def test_tensor_parallel(checkpoint, tmp_path, prefill, decode):
    def engine(tp):
        return {"tp": tp, "threads": "|".join("01"[:tp]), "extra": DEBUG}

    with pair(checkpoint, tmp_path, prefill=engine(prefill), decode=engine(decode)) as engines:
        prompts = [prompt_of(n) for n in (1, 129, 2500)]
        for prompt in prompts:
            assert engines.through(prompt) == engines.alone(prompt)
        assert failures(engines.decode) == {}
        log = engines.decode.log.read_text()
        reason = f"tensor-parallel sizes differ (prefill {prefill}, decode {decode})"
        assert (reason in log) == (prefill != decode)
        assert ("a row is one piece" in log) == (prefill == decode)
        wait_for(engines.prefill, USAGE, 0.0)


def test_descriptors_against_the_stock_connector(checkpoint, tmp_path):
    """The same prompts through both; NIXL's telemetry counts."""
    prompts = [prompt_of(n) for n in (128, 700, 2500)]
    blocks, found, texts = 1 + 6 + 20, {}, {}
    for connector in (ROWS, STOCK):
        patient = {"extra": PATIENT if connector == ROWS else {}}
        logs = tmp_path / connector
        with pair(
            checkpoint, logs, connector=connector, prefill=patient, decode=patient
        ) as engines:
            texts[connector] = [engines.through(p) for p in prompts]
            assert texts[connector] == [engines.alone(p) for p in prompts]
            found[connector] = settled(engines.decode, connector, 3)
    assert texts[ROWS] == texts[STOCK]
    assert found[ROWS].nbytes == found[STOCK].nbytes == blocks * 175_104
    # The tiny model has 4 main and 3 index pages a block.
    assert found[STOCK].descriptors == 7 * blocks
    assert found[ROWS].descriptors <= blocks


def test_handshake_refusal_between_engines(checkpoint, tmp_path):
    """Another index dtype on one side: both logs name both values, the request is recomputed."""
    other = ("--attention-config", json.dumps({"indexer_kv_dtype": "fp8"}))
    with pair(
        checkpoint,
        tmp_path,
        prefill={"flags": other, "extra": PATIENT},
        decode={"extra": PATIENT},
    ) as engines:
        prompt = prompt_of(300)
        params = engines.prefilled(prompt)
        got = ids(engines.ask(engines.decode, prompt, 8, kv_transfer_params=params))
        assert got == ids(engines.ask(engines.decode, prompt, 8))
        assert failures(engines.decode) == {"handshake": 1}
        for server in (engines.prefill, engines.decode):
            words = "index cache dtype: prefill has 'fp8', decode has 'nvfp4'"
            assert words in server.log.read_text()


def hand_over(engines, prompts, tokens):
    """Prefill all, then ask the decode engine for all at once; the answers' tokens."""
    handed = [engines.prefilled(p) for p in prompts]
    return decode_all(engines, prompts, handed, tokens)


def decode_all(engines, prompts, handed, tokens, meanwhile=None):
    calls = [
        lambda p=p, k=k: ids(engines.ask(engines.decode, p, tokens, kv_transfer_params=k))
        for p, k in zip(prompts, handed, strict=True)
    ]
    return at_once([*calls, *([meanwhile] if meanwhile else [])], 9)[: len(calls)]


def test_faults_of_a_pair(checkpoint, tmp_path):
    """Expiry, a full pool, prefill killed under load and started anew, the decode engine's end."""
    # A lease is waited for twice; the six prompts must be prefilled within one.
    extra = {"lease_seconds": 60.0, "control_timeout_seconds": 20.0, "read_timeout_seconds": 30.0}
    # 28 blocks: three of the long prompts at a time.
    small = ("--num-gpu-blocks-override=28", "--max-model-len=3000")
    with pair(
        checkpoint,
        tmp_path,
        prefill={"extra": extra},
        decode={"extra": extra, "flags": small},
    ) as engines:
        prefill, decode = engines.prefill, engines.decode
        prompts = [prompt_of(1000, seed=s) for s in range(6)]
        expected = [engines.alone(p, 40) for p in prompts]

        # Blocks that nobody reads in time are freed; who comes late computes the prompt itself.
        params = engines.prefilled(prompts[0])
        wait_for(prefill, EXPIRED, 1)
        wait_for(prefill, USAGE, 0.0)
        late = engines.ask(decode, prompts[0], 40, kv_transfer_params=params)
        assert ids(late) == expected[0]
        assert failures(decode) == {"stale": 1}

        # More requests than the pool holds wait on leases that are renewed.
        assert hand_over(engines, prompts, 40) == expected
        assert failures(decode) == {"stale": 1}
        wait_for(prefill, USAGE, 0.0)

        # Stopped, then killed, with requests in every stage: all are answered rightly.
        def kill():
            for process in prefill.processes():
                process.send_signal(signal.SIGSTOP)
            time.sleep(1.0)
            prefill.stop(grace=0)

        handed = [engines.prefilled(p) for p in prompts]
        promised = handed[0]
        assert decode_all(engines, prompts, handed, 40, meanwhile=kill) == expected
        wait_for(decode, USAGE, 0.0)

        # Its successor at the same address refuses what it has not promised, and serves its own.
        prefill.start()
        prefill.wait_healthy(1200, lambda *_: None)
        refused = failures(decode).get("handshake", 0)
        other = prompt_of(700, seed=49)  # not in the decode engine's prefix cache
        old = ids(engines.ask(decode, other, 8, kv_transfer_params=promised))
        assert old == engines.alone(other)
        assert failures(decode)["handshake"] == refused + 1
        reads = transfers(decode, ROWS).reads
        fresh = prompt_of(700, seed=50)
        assert engines.through(fresh) == engines.alone(fresh)
        assert settled(decode, ROWS, reads + 1).reads == reads + 1

        # A decode engine that dies leaves blocks behind: they are freed when their lease ends.
        for prompt in prompts[:3]:
            engines.prefilled(prompt)
        decode.stop(grace=0)
        wait_for(prefill, EXPIRED, 3)
        wait_for(prefill, USAGE, 0.0)
        assert engines.alone(prompt_of(64, seed=9), 4)


def test_policy_fail_gives_a_clear_error(checkpoint, tmp_path):
    with pair(checkpoint, tmp_path, decode={"extra": PATIENT}, policy="fail") as engines:
        prompt = prompt_of(200)
        params = engines.prefilled(prompt)
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            lost = params | {"remote_port": nobody.getsockname()[1]}
            code, text = status_of(
                lambda: engines.ask(engines.decode, prompt, 8, kv_transfer_params=lost)
            )
        assert code == 500, text
        assert failures(engines.decode) == {"handshake": 1}
        again = engines.ask(engines.decode, prompt, 8, kv_transfer_params=params)
        assert ids(again) == engines.alone(prompt)
        wait_for(engines.decode, USAGE, 0.0)


def test_500_requests_with_random_aborts(checkpoint, tmp_path):
    """Clients that leave at any moment: no wrong token, no block, thread or lease is left."""
    extra = {"extra": DEBUG | {"lease_seconds": 60.0}}
    with pair(checkpoint, tmp_path, proxy=True, prefill=extra, decode=extra) as engines:
        generator = random.Random(0)
        prompts = [prompt_of(generator.randrange(1, 700), seed=s) for s in range(25)]
        expected = [engines.alone(p, 8) for p in prompts]
        assert engines.through(prompts[0]) == expected[0]
        servers = (engines.prefill, engines.decode)

        def one(number: int) -> str:
            dice = random.Random(f"request {number}")
            chosen = dice.randrange(len(prompts))
            body = {
                "model": SERVED_NAME,
                "prompt": prompts[chosen],
                "max_tokens": 8,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 1,
                "return_tokens_as_token_ids": True,
            }
            leaves = dice.random() < 0.5
            patience = dice.uniform(0.005, 1.5) if leaves else 300
            try:
                got = ids(post(engines.proxy, body, timeout=patience))
            except (TimeoutError, OSError):
                assert leaves
                return "left"
            assert got == expected[chosen]
            return "answered"

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            outcomes = list(pool.map(one, range(250)))
            # By now the pools that start their threads on demand are full.
            before = {server: threads(server) for server in servers}
            outcomes += pool.map(one, range(250, 500))
        assert outcomes.count("answered") > 200
        assert outcomes.count("left") > 50
        for server in servers:
            wait_for(server, USAGE, 0.0)
            wait_for(server, "vllm:num_requests_running", 0.0)
            wait_for(server, "vllm:num_requests_waiting", 0.0)
            assert threads(server) <= before[server] + 4
        assert failures(engines.decode) == {}
        assert engines.through(prompts[1]) == expected[1]


def test_demo_pd(tmp_path):
    """`make demo-pd` with our connector alone, as a new user runs it; nothing is left behind."""
    before = {p.pid for p in psutil.process_iter()}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "examples" / "pd" / "demo.py")),
            *("--only", ROWS, "--cache-dir", str(tmp_path / "cache")),
        ],
        env=environment | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [line for line in done.stdout.splitlines() if "ours" in line and "the same" in line]
    assert len(rows) == 3
    assert "All processes ended." in done.stdout
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    assert not [p for p in left if str(tmp_path) in " ".join(p.info["cmdline"] or [])]

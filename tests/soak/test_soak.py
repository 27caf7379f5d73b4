"""A server under 1,000 requests: right tokens, no 5xx for a client's fault, nothing kept.

    pytest -m slow tests/soak -s      prints what the server holds after each hundred

`rocm-msa serve` with a small cache (preemption happens) and more clients than places in a batch.
Every hundred requests the server comes to rest: no block is held then, and after the warm-up no
process has more threads, files or memory than it had.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from rocm_msa.demo.server import Server, free_port, open_url
from tests.soak import client, traffic, watch

SEED = 20261130
REQUESTS, BATCH, WARM_UP = 1000, 100, 300
KNOWN, CLIENTS = 24, 12
CACHE_BYTES = 6 * 2**20
KEEPS_NOTHING = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "4",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_MMAP_THRESHOLD_": "131072",
}
"""Without these the worker's memory would hide a leak: oneDNN keeps code for the last 1,024 shapes
of matrices, and malloc keeps what was freed."""
MEMORY_BOUND = 32.0
"""MiB that a process may grow between the warm-up's end and the soak's."""


@pytest.fixture
def server(tmp_path):
    from rocm_msa.checkpoint.make import make_checkpoint

    make_checkpoint(tmp_path / "tiny")
    port = free_port()
    command = [sys.executable, "-c", "from rocm_msa.cli import main; main()"]
    command += ["serve", str(tmp_path / "tiny"), "--host=127.0.0.1", f"--port={port}"]
    command += [f"--served-model-name={traffic.MODEL}", f"--max-model-len={traffic.MAX_LENGTH}"]
    command += ["--max-num-seqs=8", f"--kv-cache-memory-bytes={CACHE_BYTES}", "--enforce-eager"]
    command += ["--reasoning-parser=minimax_m3", "--tool-call-parser=minimax_m3"]
    command += ["--enable-auto-tool-choice", "--dtype=float32", "--disable-uvicorn-access-log"]
    settings = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    settings |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    settings |= KEEPS_NOTHING
    taken = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")
    environment = {k: v for k, v in os.environ.items() if k not in taken} | settings
    one = Server(command, port, tmp_path / "log", environment)
    try:
        one.start()
        one.wait_healthy(900, lambda seconds, line: None)
        yield one
    finally:
        one.stop()


def answered(server: Server, known: traffic.Known) -> traffic.Known:
    """`known` with the idle server's answer."""
    wanted = {"logprobs": True, "top_logprobs": 2} if "messages" in known.body else {"logprobs": 2}
    body = {**known.body, **wanted, "max_tokens": traffic.ANSWER_TOKENS}
    case = traffic.Case("table", known.path, json.dumps(body).encode())
    return traffic.answer(known, _choice(server, case))


def _choice(server: Server, case: traffic.Case) -> dict:
    from urllib.request import Request

    headers = {"Content-Type": "application/json"}
    request = Request(server.url + case.path, case.data, headers)
    with open_url(request, timeout=client.TIMEOUT_SECONDS) as response:
        return json.load(response)["choices"][0]


def run(server: Server, cases: list[traffic.Case]) -> list[str]:
    """The faults of `cases`, sent by CLIENTS clients at once."""

    def one(case: traffic.Case) -> str | None:
        try:
            return client.fault(case, client.send(server.port, case))
        except (OSError, ValueError, client.http.client.HTTPException) as error:
            return f"{case.kind} {case.path}: {error!r} for {case.data[:200]}"

    with ThreadPoolExecutor(CLIENTS) as pool:
        return [fault for fault in pool.map(one, cases) if fault]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_soak(server):
    rng = random.Random(SEED)
    known = [answered(server, one) for one in traffic.unanswered(rng, KNOWN)]
    known = [one for one in known if one.tokens]
    assert len(known) > KNOWN // 2
    cases = traffic.plan(rng, known, REQUESTS)
    first, faults, after_warm_up = watch.wait_idle(server), [], None
    for start in range(0, REQUESTS, BATCH):
        faults += run(server, cases[start : start + BATCH])
        now = watch.wait_idle(server)
        held = watch.held(server)
        print(f"{start + BATCH} requests: {list(held.values())}; {len(faults)} faults")
        if start + BATCH == WARM_UP:
            after_warm_up = held
    assert not faults, f"{len(faults)} faults: {faults[:10]}"
    watch.until(
        "nothing grew",
        lambda: not watch.growth(after_warm_up, watch.held(server), MEMORY_BOUND),
        seconds=300.0,
    )
    changed = {k: v - first.get(k, 0.0) for k, v in now.items()}
    print({k: changed[k] for k in ("vllm:num_preemptions_total", "vllm:request_success_total")})
    assert now["rocm_msa_compiles_while_serving_total"] == 0
    assert now["rocm_msa_cache_blocks"] == first["rocm_msa_cache_blocks"]
    assert not run(server, [case for case in cases if case.kind == "known"][:KNOWN])


def test_the_plan_is_the_same_for_the_same_seed_and_has_every_kind():
    known = [traffic.Known(traffic.CHAT, {"model": "m", "messages": []}, (1, 2))]
    one, two = (traffic.plan(random.Random(3), known, 1000) for _ in range(2))
    assert one == two != traffic.plan(random.Random(4), known, 1000)
    assert Counter(case.kind for case in one) == {k: 10 * n for k, n in traffic.MIX.items()}
    refused = {(case.path, case.data) for case in one if case.kind == "refused"}
    assert len(refused) > 0.6 * len(traffic.REFUSED)
    assert {case.stream for case in one if case.kind == "known"} == {True, False}


def test_an_answer_ends_before_a_near_tie():
    known = traffic.Known(traffic.COMPLETIONS, {})
    near = 0.9 * traffic.MARGIN
    for logprobs in (
        {
            "top_logprobs": [
                {"a": -1.0, "b": -2.0},
                {"a": -1.0, "b": -1.0 - near},
                {"a": 0, "b": -9},
            ]
        },
        {
            "content": [
                {"top_logprobs": [{"logprob": -x}, {"logprob": -y}]}
                for x, y in ((1.0, 2.0), (1.0, 1.0 + near), (0.0, 9.0))
            ]
        },
    ):
        choice = {"token_ids": [7, 8, 9], "logprobs": logprobs}
        assert traffic.answer(known, choice).tokens == (7,)


CASES = {kind: traffic.Case(kind, traffic.CHAT, b"{}", events=1) for kind in traffic.MIX}
KNOWN_CASE = traffic.Case("known", traffic.CHAT, b"{}", tokens=(1, 2))
SAMPLED = traffic.Case("sampled", traffic.CHAT, b"{}", count=4)


@pytest.mark.parametrize(
    ("case", "result", "right"),
    [
        (KNOWN_CASE, client.Result(200, tokens={0: [1, 2]}, done=True), True),
        (KNOWN_CASE, client.Result(200, tokens={0: [1, 3]}, done=True), False),
        (KNOWN_CASE, client.Result(200, tokens={0: [1]}, done=True), False),
        (KNOWN_CASE, client.Result(200, tokens={0: [1, 2]}), False),
        (KNOWN_CASE, client.Result(400), False),
        (SAMPLED, client.Result(200, tokens={0: [1, 2], 1: [3, 4]}, done=True), True),
        (SAMPLED, client.Result(200, tokens={0: [1, 2]}, done=True), False),
        (CASES["refused"], client.Result(400, {"code": 400}), True),
        (CASES["refused"], client.Result(200, {"code": 400}, done=True), True),
        (CASES["refused"], client.Result(200, done=True), False),
        (CASES["refused"], client.Result(500, {"code": 500}), False),
        (CASES["refused"], client.Result(200, {"code": 500}), False),
        (CASES["strange"], client.Result(200, done=True), True),
        (CASES["strange"], client.Result(400, {"code": 400}), True),
        (CASES["strange"], client.Result(500, {"code": 500}), False),
        (CASES["rare"], client.Result(200, done=True), True),
        (CASES["rare"], client.Result(200), False),
        (CASES["rare"], client.Result(400, {"code": 400}), False),
        (CASES["leave"], client.Result(200), True),
        (CASES["leave"], client.Result(200, {"code": 500}), False),
        (CASES["vanish"], client.Result(), True),
        (CASES["garbage"], client.Result(400), True),
        (CASES["garbage"], client.Result(200), False),
    ],
)
def test_a_wrong_answer_is_a_fault(case, result, right):
    assert (client.fault(case, result) is None) is right


def test_what_grew_is_seen():
    held = watch.Held("engine", 100.0, 5, 20)
    assert watch.growth({1: held}, {1: held}, 8.0) == []
    for more in (
        {1: watch.Held("engine", 109.0, 5, 20)},
        {1: watch.Held("engine", 100.0, 6, 20)},
        {1: watch.Held("engine", 100.0, 5, 21)},
        {1: held, 2: held},
    ):
        assert watch.growth({1: held}, more, 8.0), more
    assert watch.growth({1: held}, {1: watch.Held("engine", 107.0, 4, 19)}, 8.0) == []

"""Running pairs of engines for the prefill/decode tests, and what is asked of them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocm_msa.demo.pair import (
    ROWS,
    Engine,
    decode_engine,
    engine_server,
    metrics,
    prefill_engine,
    proxy_server,
    running,
)
from rocm_msa.demo.prepare import SERVED_NAME
from rocm_msa.demo.server import Server, open_url

ROOT = Path(__file__).resolve().parents[2]
PROXY = ROOT / "examples" / "pd" / "proxy.py"
READ = "vllm:rocm_msa_kv_read"
FAILED = "vllm:rocm_msa_kv_failed"
EXPIRED = "vllm:rocm_msa_kv_expired_total"
USAGE = "vllm:kv_cache_usage_perc"
START_SECONDS = 1200.0
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Pair:
    """A prefill and a decode engine, and the proxy (None without one)."""

    prefill: Server
    decode: Server
    proxy: Server | None
    connector: str
    expected: dict[str, list[str]] = field(default_factory=dict)

    def ask(self, server: Server, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        """A greedy completion; raises HTTPError."""
        body = {
            "model": SERVED_NAME,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        return post(server, body | more)

    def prefilled(self, prompt: list[int]) -> dict[str, Any]:
        """The prefill engine's kv_transfer_params."""
        params = self.ask(self.prefill, prompt, 1, kv_transfer_params=KEEP)["kv_transfer_params"]
        assert params, "the prefill engine kept nothing"
        return params

    def through(self, prompt: list[int], tokens: int = 8) -> list[str]:
        """Tokens of both engines in turn."""
        params = self.prefilled(prompt)
        return ids(self.ask(self.decode, prompt, tokens, kv_transfer_params=params))

    def alone(self, prompt: list[int], tokens: int = 8) -> list[str]:
        """Tokens of the prefill engine by itself: the expectation."""
        key = json.dumps([prompt, tokens])
        if key not in self.expected:
            self.expected[key] = ids(self.ask(self.prefill, prompt, tokens))
        return self.expected[key]


def ids(answer: dict[str, Any]) -> list[str]:
    return answer["choices"][0]["logprobs"]["tokens"]


def post(
    server: Server, body: dict[str, Any], path: str = "/v1/completions", timeout: float = 400
) -> dict[str, Any]:
    request = urllib.request.Request(
        server.url + path,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with open_url(request, timeout=timeout) as response:
        return json.load(response)


def status_of(call) -> tuple[int, str]:
    """HTTP status and text of a call that may fail."""
    try:
        return 200, json.dumps(call())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def failures(server: Server) -> dict[str, float]:
    """Failed loads by kind, those that are not 0."""
    kinds = {
        k.removeprefix(f"{FAILED}_").removesuffix("_total"): v
        for k, v in metrics(server).items()
        if k.startswith(FAILED) and k.endswith("_total")
    }
    return {k: v for k, v in kinds.items() if v}


def wait_for(server: Server, name: str, value: float, seconds: float = 240.0) -> None:
    """Until a metric has a value."""
    end = time.monotonic() + seconds
    while (got := metrics(server).get(name)) != value:
        assert time.monotonic() < end, f"{name}: expected {value}, got {got}"
        time.sleep(0.2)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids; two seeds share no block."""
    generator = random.Random(f"{length} {seed}")
    return [generator.randrange(5, 1000) for _ in range(length)]


def at_once(calls, workers: int = 8) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return [f.result() for f in [pool.submit(call) for call in calls]]


@contextlib.contextmanager
def pair(
    checkpoint: str,
    logs: Path,
    *,
    connector: str = ROWS,
    main: str = "nvfp4",
    index: str = "nvfp4",
    prefill: dict | None = None,
    decode: dict | None = None,
    policy: str = "recompute",
    proxy: bool = False,
    flags: tuple[str, ...] = (),
) -> Iterator[Pair]:
    """Two engines in float32, so that tokens are those of a single engine; all are ended."""
    common = (
        "--dtype=float32",
        f"--kv-cache-dtype={ {'bf16': 'bfloat16'}.get(main, main) }",
        "--attention-config",
        json.dumps({"indexer_kv_dtype": index}),
        *flags,
    )

    def engine(made: Engine) -> Engine:
        flags, environment = common + made.flags, {"VLLM_LOGGING_LEVEL": "INFO"} | made.environment
        return Engine(made.role, made.threads, made.tp, made.extra, flags, environment)

    p_engine = engine(prefill_engine(**(prefill or {})))
    d_engine = engine(decode_engine(**(decode or {})))
    logs.mkdir(parents=True, exist_ok=True)
    path = Path(checkpoint)
    servers = [
        engine_server(path, p_engine, connector, logs / "prefill.log", policy),
        engine_server(path, d_engine, connector, logs / "decode.log", policy),
    ]
    front = proxy_server(PROXY, *servers, logs / "proxy.log") if proxy else None
    with running([*servers, *([front] if front else [])], timeout=START_SECONDS):
        yield Pair(servers[0], servers[1], front, connector)

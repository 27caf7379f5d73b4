"""The emulated demo's judgement of what its servers answered, and its flags."""

from __future__ import annotations

import http.server
import io
import json
import threading

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rocm_msa.cli import app
from rocm_msa.demo import emulated
from rocm_msa.demo.client import Client, Sample, Token
from rocm_msa.demo.emulated import (
    DECODE_CP,
    MONO_STEPS,
    OP_CALLS,
    ROUNDING,
    WORK,
    Run,
    runs_of,
)
from rocm_msa.demo.server import DemoError

TOKENS = [Token(5, -1.0, 2.0), Token(6, -2.0, 0.25), Token(7, -0.5, 3.0)]


def run(title: str, *tokens: Token, samples: tuple = (), **options) -> Run:
    return Run(title, options, list(tokens), list(samples))


def compared(*runs: Run) -> str:
    out = io.StringIO()
    emulated.compare(list(runs), Console(file=out, width=400))
    return out.getvalue()


def test_equal_tokens():
    moved = [Token(t.id, t.logprob + 0.125, t.margin) for t in TOKENS]
    text = compared(run("reference", *TOKENS), run("emulated", *moved))
    assert "emulated: all 3 tokens are the reference's; their log-probabilities differ by" in text
    assert "up to 0.12." in text


def test_another_token_where_two_are_close():
    other = [TOKENS[0], Token(9, -2.0, 0.1), Token(1, -1.0, 1.0)]
    text = compared(run("reference", *TOKENS), run("emulated", *other))
    assert "1 of 3 tokens are the reference's; then its two best are only 0.25 nats apart" in text


def test_another_token_where_none_is_close():
    other = [*TOKENS[:2], Token(1, -0.5, 3.0)]
    words = r"emulated: token 2 is 1, the reference's is 7, by a margin of 3.00 nats"
    with pytest.raises(DemoError, match=words):
        compared(run("reference", *TOKENS), run("emulated", *other))


def test_a_log_probability_that_moved_too_far():
    far = [Token(5, -1.0 - 1.5 * ROUNDING, 2.0), *TOKENS[1:]]
    with pytest.raises(DemoError, match=r"a log-probability moved by 1.20 nats"):
        compared(run("reference", *TOKENS), run("emulated", *far))


def test_shared_and_alone_must_be_the_same_bits():
    runs = [run("reference", *TOKENS), run("shared", *TOKENS), run("alone", *TOKENS)]
    assert "alone: the same tokens and log-probabilities, bit for bit" in compared(*runs)
    runs[2].tokens[1] = Token(6, -2.0 - 1e-7, 0.25)
    with pytest.raises(DemoError, match=r"alone: \[Token"):
        compared(*runs)


def calls(op: str, backend: str, count: float) -> Sample:
    return Sample(OP_CALLS, {"op": op, "backend": backend, "reason": "asked for"}, count)


def work(kernel: str, launches: int) -> list[Sample]:
    of = {"kernel": kernel}
    return [
        Sample(WORK["launches"], of, launches),
        Sample(WORK["wave-instructions"], of, 1000 * launches),
        *(Sample(WORK["bytes"], of | {"way": way}, n) for way, n in (("read", 7), ("written", 5))),
    ]


def shown(*samples: Sample, **options) -> str:
    out = io.StringIO()
    first = run("reference", samples=(calls("sparse_decode", "reference", 21),))
    second = run("emulated", samples=samples, **options)
    emulated.show_work([first, second], Console(file=out, width=200))
    return out.getvalue()


def test_what_ran_is_shown():
    text = shown(
        calls("sparse_decode", "emulated", 21),
        calls("dense_attention", "reference", 8),
        *work("sparse_decode_p4", 21),
        *work("sparse_decode_p2", 2),
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "sparse_decode 21 reference 21 emulated" in lines
    assert "dense_attention 8 reference" in lines
    assert "sparse_decode_p4 21 21,000 7 5" in lines
    assert "all 23 23,000 14 10" in lines


def test_an_op_that_fell_back_fails_the_demo():
    with pytest.raises(DemoError, match="emulated: block_topk did not run in it"):
        shown(calls("block_topk", "emulated", 3), calls("block_topk", "reference", 1))


@pytest.mark.parametrize("path", ["alone", None])
def test_batches_that_were_not_shared_fail_the_demo(path):
    samples = [Sample(DECODE_CP, {"path": path, "reason": "short"}, 1)] if path else []
    with pytest.raises(DemoError, match="expected shared decode batches, got"):
        shown(*samples, indexer_decode_cp=True)


@pytest.mark.parametrize(("mono", "other"), [(0, 7), (6, 1), (8, 0)])
def test_decode_steps_beside_the_mono_kernel_fail_the_demo(mono, other):
    steps = [
        Sample(MONO_STEPS, {"path": path, "reason": reason}, n)
        for path, reason, n in (
            ("mono", "decode", mono),
            ("layers", "rows", other),
            ("layers", "prefill", 1),
        )
    ]
    with pytest.raises(DemoError, match="expected all decode steps on the mono path"):
        shown(*steps, mono=True)
    assert "function, not time" in shown(*mono_steps(7), mono=True)


def mono_steps(count: int) -> list[Sample]:
    return [Sample(MONO_STEPS, {"path": "mono", "reason": "decode"}, count)]


def test_the_runs():
    assert [r.options["backend"] for r in runs_of(1)] == ["reference", "emulated"]
    assert [r.options["mono"] for r in runs_of(2, mono=True)] == [True] * 3
    options = [r.options for r in runs_of(2)]
    assert options[1]["indexer_decode_cp"] and "indexer_decode_cp" not in options[2]
    for mono in (False, True):
        ids = emulated.prompt(mono)
        assert len(ids) == emulated.PROMPT_TOKENS and 3 <= min(ids) <= max(ids) < 900
        assert len(set(ids)) > 100 and ids == emulated.prompt(mono) != emulated.prompt(not mono)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "2"], "--tp, --mono: only with --emulated"),
        (["--mono"], "--tp, --mono: only with --emulated"),
        (["--emulated", "--serve"], "--emulated: starts and stops servers"),
        (["--emulated", "--port", "80"], "--emulated: starts and stops servers"),
    ],
)
def test_flags_that_do_not_go_together(arguments, words):
    done = CliRunner().invoke(app, ["demo", *arguments])
    assert done.exit_code == 2 and words in done.output


COMPLETION = {
    "choices": [
        {
            "logprobs": {
                "tokens": ["token_id:5", "token_id:6"],
                "token_logprobs": [-1.0, -2.0],
                "top_logprobs": [
                    {"token_id:5": -1.0, "token_id:8": -3.0},
                    {"token_id:9": -2.0, "token_id:6": -2.0},
                ],
            }
        }
    ]
}
METRICS = """# HELP rocm_msa_op_calls_total calls
rocm_msa_op_calls_total{backend="emulated",op="x",reason="asked for"} 3.0
rocm_msa_plain 2
vllm:other{a="b"} 1
"""


class Handler(http.server.BaseHTTPRequestHandler):
    asked: dict

    def do_POST(self):
        type(self).asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(json.dumps(COMPLETION))

    def do_GET(self):
        self.answer(METRICS)

    def answer(self, text: str):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def client():
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Client(f"http://127.0.0.1:{server.server_port}", "m")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_clients_tokens(client):
    assert client.greedy([1, 2], 2) == [Token(5, -1.0, 2.0), Token(6, -2.0, 0.0)]
    assert Handler.asked["prompt"] == [1, 2] and Handler.asked["temperature"] == 0
    with pytest.raises(DemoError, match="asked for 3 tokens, got 2"):
        client.greedy([1, 2], 3)


def test_the_clients_samples(client):
    labels = {"backend": "emulated", "op": "x", "reason": "asked for"}
    assert client.samples("rocm_msa_") == [
        Sample(OP_CALLS, labels, 3.0),
        Sample("rocm_msa_plain", {}, 2.0),
    ]

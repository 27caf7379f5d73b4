"""A prefill and a decode engine on this machine: tokens of a single engine, one read a block.

One pair serves the whole file; the last test ends its prefill engine.
"""

from __future__ import annotations

import contextlib
import signal

import pytest

from rocm_msa.demo.pair import metrics, settled, transfers
from rocm_msa.demo.prepare import SERVED_NAME
from tests.vllm_plugin.pd_pair import (
    READ,
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
# The first test starts the engines: minutes on a machine with other work.
pytestmark = pytest.mark.timeout(1500)

CHUNK = 1024


@pytest.fixture(scope="module")
def engines(checkpoint, tmp_path_factory):
    # Silence of 15 s is a dead engine, at once: short for the last test, long for a busy machine.
    extra = {"extra": {"control_timeout_seconds": 15.0, "retries": 0, "lease_seconds": 300.0}}
    with pair(
        checkpoint,
        tmp_path_factory.mktemp("pd"),
        proxy=True,
        prefill=extra,
        decode=extra,
        flags=(f"--max-num-batched-tokens={CHUNK}",),
    ) as running:
        yield running


@contextlib.contextmanager
def reading(engines, reads: int, blocks: int):
    """What the decode engine reads meanwhile, in a list of one; checks reads and blocks."""
    name, found = f"{READ}_blocks_sum", []
    before = transfers(engines.decode, engines.connector)
    blocks_before = metrics(engines.decode).get(name, 0)
    yield found
    found.append(settled(engines.decode, engines.connector, before.reads + reads).since(before))
    assert found[0].reads == reads
    assert metrics(engines.decode)[name] - blocks_before == blocks


@pytest.mark.parametrize("length", [1, 127, 128, 129, 5000])
def test_tokens_are_those_of_one_engine(engines, length):
    """5,000 tokens are prefilled in chunks, and more blocks than the indexer selects."""
    prompt, count = prompt_of(length), -(-length // 128)
    with reading(engines, reads=1, blocks=count) as read:
        assert engines.through(prompt) == engines.alone(prompt)
    assert 1 <= read[0].descriptors <= count
    assert read[0].nbytes == count * 175_104


def test_prefix_hits_on_either_side(engines):
    """Only the blocks that the decode engine lacks are read, whatever prefill had cached."""
    shared, tail = prompt_of(512, seed=3), prompt_of(200, seed=4)
    with reading(engines, reads=1, blocks=4):
        engines.through(shared)
    with reading(engines, reads=1, blocks=2):
        assert engines.through(shared + tail) == engines.alone(shared + tail)
    full = shared + prompt_of(128, seed=5)
    with reading(engines, reads=1, blocks=1):
        assert engines.through(full) == engines.alone(full)
    # All of it is there, but vLLM computes a prompt's last token anew, so its block is read.
    with reading(engines, reads=1, blocks=1):
        assert engines.through(full) == engines.alone(full)


def test_concurrent_requests_through_the_proxy(engines):
    prompts = [prompt_of(100 + 60 * i, seed=i) for i in range(8)]

    def through(prompt):
        body = {
            "model": SERVED_NAME,
            "prompt": prompt,
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        return ids(post(engines.proxy, body))

    answers = at_once([lambda p=p: through(p) for p in prompts])
    assert answers == [engines.alone(p, 6) for p in prompts]


def test_incomplete_parameters_mean_a_local_prefill(engines):
    prompt = prompt_of(150, seed=9)
    for params in ({"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_host": "x"}):
        answer = engines.ask(engines.decode, prompt, 8, kv_transfer_params=params)
        assert ids(answer) == engines.alone(prompt)


def test_the_proxy_names_what_it_refuses(engines):
    for body, words in (
        ({"prompt": ["a", "b"]}, "one prompt a request, got 2"),
        ({"prompt": "a", "kv_transfer_params": {"x": 1}}, "set by this proxy"),
    ):
        code, text = status_of(lambda b=body: post(engines.proxy, b | {"model": SERVED_NAME}))
        assert code == 400 and words in text
    code, text = status_of(lambda: post(engines.proxy, {"model": "none", "prompt": "a"}))
    assert code == 404 and "none" in text


def test_prefill_engine_dies(engines):
    """Stopped while it is read from, then killed: the decode engine computes the prompt itself."""
    prompts = [prompt_of(300, seed=s) for s in (20, 21, 22)]
    expected = [engines.alone(p) for p in prompts]
    params = [engines.prefilled(p) for p in prompts]
    for process in engines.prefill.processes():
        process.send_signal(signal.SIGSTOP)
    during = engines.ask(engines.decode, prompts[0], 8, kv_transfer_params=params[0])
    assert ids(during) == expected[0]
    engines.prefill.stop(grace=0)
    after = at_once(
        [
            lambda p=p, k=k: engines.ask(engines.decode, p, 8, kv_transfer_params=k)
            for p, k in zip(prompts[1:], params[1:], strict=True)
        ]
    )
    assert [ids(a) for a in after] == expected[1:]
    assert sum(failures(engines.decode).values()) == 3
    # The proxy goes on without a prefill engine.
    body = {"model": SERVED_NAME, "prompt": prompts[0], "max_tokens": 8, "temperature": 0}
    more = {"ignore_eos": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    assert ids(post(engines.proxy, body | more)) == expected[0]
    wait_for(engines.decode, USAGE, 0.0)

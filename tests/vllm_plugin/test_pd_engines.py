"""A prefill and a decode engine on this machine: tokens of a single engine, one read a block.

One pair serves the whole file; the last test ends its prefill engine.
"""

from __future__ import annotations

import signal

import pytest

from rocm_msa.demo.pair import metrics, settled, transfers
from rocm_msa.demo.prepare import SERVED_NAME
from tests.vllm_plugin.pd_pair import at_once, ids, pair, post, prompt_of, status_of

pytest.importorskip("nixl", reason="NIXL is not installed")

CHUNK = 1024
READ = "vllm:rocm_msa_kv_read"


@pytest.fixture(scope="module")
def engines(checkpoint, tmp_path_factory):
    fast = {"extra": {"control_timeout_seconds": 2.0}}
    with pair(
        checkpoint,
        tmp_path_factory.mktemp("pd"),
        proxy=True,
        prefill=fast,
        decode=fast,
        flags=(f"--max-num-batched-tokens={CHUNK}",),
    ) as running:
        yield running


@pytest.mark.parametrize("length", [1, 127, 128, 129, 5000])
def test_tokens_are_those_of_one_engine(engines, length):
    """5,000 tokens are prefilled in chunks, and more blocks than the indexer selects."""
    before = transfers(engines.decode, engines.connector)
    blocks = metrics(engines.decode).get(f"{READ}_blocks_sum", 0)
    prompt = prompt_of(length)
    assert engines.through(prompt) == engines.alone(prompt)
    read = settled(engines.decode, engines.connector, before.reads + 1).since(before)
    count = -(-length // 128)
    assert read.reads == 1
    assert 1 <= read.descriptors <= count
    assert metrics(engines.decode)[f"{READ}_blocks_sum"] - blocks == count
    assert read.nbytes == count * 175_104


def test_prefix_hits_on_either_side(engines):
    """Only the blocks that the decode engine lacks are read, whatever prefill had cached."""
    shared, tail = prompt_of(512, seed=3), prompt_of(200, seed=4)
    engines.through(shared)
    blocks = f"{READ}_blocks_sum"
    settled(engines.decode, engines.connector, 1)
    before = metrics(engines.decode)[blocks]
    assert engines.through(shared + tail) == engines.alone(shared + tail)
    assert metrics(engines.decode)[blocks] - before == 2
    # The whole prompt is there (its last block is full): nothing is read, prefill is released.
    full = shared + prompt_of(128, seed=5)
    assert engines.through(full) == engines.alone(full)
    before = metrics(engines.decode)[blocks]
    assert engines.through(full) == engines.alone(full)
    assert metrics(engines.decode)[blocks] - before <= 1


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
    found = metrics(engines.decode)
    failed = sum(v for k, v in found.items() if "rocm_msa_kv_failed" in k and "total" in k)
    assert failed == 3
    # The proxy goes on without a prefill engine.
    body = {"model": SERVED_NAME, "prompt": prompts[0], "max_tokens": 8, "temperature": 0}
    more = {"ignore_eos": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    assert ids(post(engines.proxy, body | more)) == expected[0]
    assert found["vllm:kv_cache_usage_perc"] == 0.0

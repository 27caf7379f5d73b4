"""Prefill and decode engines with `mono`: the decode engine's steps read transferred blocks."""

from __future__ import annotations

import json

import pytest
import torch

from rocm_msa.checkpoint.make import make_checkpoint
from rocm_msa.demo.pair import settled, transfers
from tests.vllm_plugin.pd_pair import failures, pair, prompt_of
from tests.vllm_plugin.test_parity_reference import BF16_TYPICAL, Yardstick

pytest.importorskip("nixl", reason="NIXL is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2500)]


def test_mono_steps_over_transferred_blocks(tmp_path):
    """A token that the whole-model reference finds unlikely would show blocks that are wrong."""
    checkpoint = str(tmp_path / "mxfp4")
    make_checkpoint(checkpoint, "tiny", "mxfp4", intermediate_size=256)
    asked = json.dumps({"rocm_msa": {"mono": True}})
    flags = ("--dtype=bfloat16", "--additional-config", asked)
    yardstick, prompts = Yardstick(checkpoint), [prompt_of(n) for n in (300, 129, 2100)]
    with pair(checkpoint, tmp_path / "logs", flags=flags) as engines:
        before = transfers(engines.decode, engines.connector)
        for prompt in prompts:
            tokens = [int(t.removeprefix("token_id:")) for t in engines.through(prompt)]
            wanted = yardstick.logprobs(prompt, tokens, "nvfp4", "nvfp4", torch.bfloat16)
            chosen = wanted.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert (wanted.amax(-1) - chosen).max() <= 2 * BF16_TYPICAL
        read = settled(engines.decode, engines.connector, before.reads + 3).since(before)
        assert read.reads == 3 and not failures(engines.decode)
    log = (tmp_path / "logs" / "decode.log").read_text()
    assert "mono: step mono (decode)" in log and "mono: step layers (prefill)" not in log

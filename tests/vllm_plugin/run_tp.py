"""Run as a script: greedy answers of a tensor-parallel engine, saved for the test that asked.

python run_tp.py CHECKPOINT OUTPUT.pt TP PROMPTS.json COUNT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.vllm_plugin.engine import engine, generate


def main(checkpoint: str, output: str, tp: str, prompts: str, count: str) -> None:
    asked = json.loads(Path(prompts).read_text())
    with engine(checkpoint, tensor_parallel_size=int(tp)) as llm:
        answers = generate(llm, asked, int(count))
    torch.save([(a.tokens, a.logprobs) for a in answers], output)


if __name__ == "__main__":
    main(*sys.argv[1:])

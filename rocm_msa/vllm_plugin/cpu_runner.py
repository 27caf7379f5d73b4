"""Seeded sampling on the CPU while a prompt is still being read.

Each chunk of a prompt but the last ends in a token that vLLM samples and throws away; a request
with a `seed` must then draw that number again. vLLM's model runner turns the generator back by its
offset, which generators of the CPU do not have: the engine would end with `CPU Generator does not
use offset`. Here the generator's state is put back instead, so that a seeded answer is the same
however its prompt was cut into chunks.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def _thrown_away(runner: Any) -> list[int]:
    """Places in the batch of the requests whose sampled token is not used."""
    mask = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
    return [int(i) for i in np.nonzero(mask)[0] if int(i) in runner.input_batch.generators]


def keep_seeded_draws() -> None:
    """Change vLLM's CPU model runner, once a process."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if "_sample" in vars(CPUModelRunner):
        return
    sample, bookkeeping = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    @functools.wraps(sample)
    def sample_and_put_back(self, *args, **kwargs):
        generators = [self.input_batch.generators[i] for i in _thrown_away(self)]
        states = [generator.get_state() for generator in generators]
        output = sample(self, *args, **kwargs)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return output

    @functools.wraps(bookkeeping)
    def bookkeeping_without_offsets(self, *args, **kwargs):
        generators = self.input_batch.generators
        aside = {i: generators.pop(i) for i in _thrown_away(self)}
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            generators.update(aside)

    CPUModelRunner._sample = sample_and_put_back
    CPUModelRunner._bookkeeping_sync = bookkeeping_without_offsets

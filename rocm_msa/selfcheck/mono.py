"""The mono kernel on one rank against its reference: a small layer, made here, of M3's structure.

What a launch hands on is rounded to bf16 several times, and a rounding that goes the other way
moves what follows: OUTPUT bounds the distance of the outputs from the reference's, of their norm.
The experts of each row must be the same. CACHE bounds the share of cache bytes that may differ: a
key whose norm differs in its last bit has other codes.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mono_kernel import reading, reference
from mono_kernel.batch import Batch
from mono_kernel.layer_gfx950 import Build
from mono_kernel.runner import MonoRunner
from mono_kernel.shapes import Shape
from mono_kernel.weights import LayerWeights
from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.checkpoint.make import make_checkpoint
from rocm_msa.checkpoint.read import open_checkpoint
from rocm_msa.config import ModelConfig
from rocm_msa.selfcheck.kernels import BLOCK, Check, moved, normal

PREFIX = "model.layers.0"
LAYOUTS = ("mxfp8", "mxfp4", "nvfp4")
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_hidden_layers": 1,
    "dense_layers": 0,
    "vocab_size": 768,
}
BATCHES = {
    "2 requests of 2 rows": ([642, 129], [2, 2]),
    "16 requests of 1 row": ([130] * 16, [1] * 16),
    "requests of 1, 4 and 2 rows": ([642, 130, 7], [1, 4, 2]),
}
MAX_BLOCKS, MAX_POSITION, PATIENCE_MS = 16, 4096, 1000
OUTPUT, CACHE = 2.0**-7, 2e-3


class Alone:
    """A group of one rank, see rocm_msa.comm.group.Group."""

    rank, ranks = 0, 1

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]


def layer(layout: str) -> LayerWeights:
    """The only layer of a made checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        make_checkpoint(directory, "tiny", layout, seed=0, **SIZES)
        found = open_checkpoint(directory)
        tensors = {n: t.clone() for n, t in found if n.startswith(PREFIX)}
        model = ModelConfig.from_json(directory)
    shape = Shape.of(model, 1, reading.formats_of(tensors, PREFIX))
    return reading.read_layer(shape, 0, tensors, PREFIX)


def checks(
    make: Callable[[Shape, Build], MonoRunner], device: torch.device, small: bool
) -> Iterator[Check]:
    """A check a weight layout and batch. make: a runner whose kernel is loaded."""
    for layout in LAYOUTS[:1] if small else LAYOUTS:
        weights = layer(layout)
        for name, (lens, rows) in list(BATCHES.items())[: 1 if small else None]:

            def fault(weights=weights, lens=lens, rows=rows) -> str | None:
                runner = make(weights.shape, Build.from_shape(weights.shape))
                try:
                    return _fault(runner, weights, lens, rows, device)
                finally:
                    runner.close()

            yield Check("mono layer", f"{layout} weights, {name}", fault)


def _batch(lens: list[int], rows: list[int]) -> tuple[Batch, int]:
    """(the batch, pages of its caches)."""
    blocks = [-(-n // BLOCK) for n in lens]
    pages = sum(blocks) + 2
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(pages)).int()
    table = torch.full((len(lens), max(blocks) + 1), -1, dtype=torch.int32)
    for request, count in enumerate(blocks):
        first = sum(blocks[:request])
        table[request, :count] = order[first : first + count]
    at = [(r, n - rows[r] + i) for r, n in enumerate(lens) for i in range(rows[r])]
    starts = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    slots = torch.tensor([int(table[r, p // BLOCK]) * BLOCK + p % BLOCK for r, p in at])
    angle = torch.arange(MAX_POSITION)[:, None] * 5e6 ** -(torch.arange(32) / 32.0)
    batch = Batch(
        torch.tensor([p for _, p in at]), slots, slots.clone(), table,
        torch.tensor(lens, dtype=torch.int32), starts, max(rows),
        torch.cat([angle.cos(), angle.sin()], 1),
    )  # fmt: skip
    return batch, pages


def _caches(shape: Shape, batch: Batch, pages: int) -> tuple[MainCache, IndexCache]:
    """With random values for the tokens before this step."""
    main, index = (
        MainCache.allocate(pages, shape.kv_heads, "nvfp4"),
        IndexCache.allocate(pages, "nvfp4"),
    )
    for request, n in enumerate(batch.seq_lens.tolist()):
        old = torch.arange(n - int(batch.starts[request + 1] - batch.starts[request]))
        slots = batch.block_table[request].long()[old // BLOCK] * BLOCK + old % BLOCK
        k, v = (normal(10 * request + i, len(old), shape.kv_heads, 128).float() for i in (1, 2))
        main.write(k, v, slots)
        index.write(normal(10 * request + 3, len(old), 128).float(), slots)
    return main, index


def _fault(runner: MonoRunner, weights: LayerWeights, lens, rows: list[int], device) -> str | None:
    batch, pages = _batch(lens, rows)
    width = weights.shape.hidden
    hidden, residual = normal(1, batch.rows, width), normal(2, batch.rows, width)
    wanted = _caches(weights.shape, batch, pages)
    (want,) = reference.layer([weights], batch, [wanted], hidden, residual)
    caches = tuple(moved(c, device) for c in _caches(weights.shape, batch, pages))
    there = Batch(**{name: moved(value, device) for name, value in vars(batch).items()})
    given = [moved(x, device) for x in (hidden, residual)]
    outs = [torch.full_like(x, torch.nan) for x in given]
    runner.run(runner.load(weights), caches, there, *given, *outs)
    outs = [out.cpu().float() for out in outs]  # waits
    runner.check()
    for name, out in zip(("hidden_out", "residual_out"), outs, strict=True):
        distance = float((out - want[name].float()).norm() / want[name].float().norm())
        if not distance <= OUTPUT:
            return f"{name}: expected within {OUTPUT:.3g} of the norm, got {distance:.3g}"
    chosen = runner.region("chosen")[: batch.rows].cpu()
    if not torch.equal(chosen, want["chosen"]):
        return f"chosen experts: expected {want['chosen'].tolist()}, got {chosen.tolist()}"
    for got, right in zip(caches, wanted, strict=True):
        share = float((got.pages.cpu() != right.pages).float().mean())
        if share > CACHE:
            return f"cache bytes: expected at most {CACHE:.3g} to differ, got {share:.3g}"
    return None

"""A step of the small layer on some ranks: inputs, caches, batch, and the reference's regions."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from mono_kernel import reference
from mono_kernel.batch import Batch
from mono_kernel.shapes import kv_head_of
from mono_kernel.weights import LayerWeights
from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.testing.reference_parts import rope_frequencies
from tests.mono_kernel.cases import KV_HEADS
from tests.mono_kernel.layers import layer_weights
from tests.ops.cases import empty_cache, int32, random_values, slots_of

DIM, BLOCK = 128, 128
MAX_POSITION = 4096
SPARE = 3  # pages that belong to nobody
# Lengths and rows: four rows over a block's edge; a request that begins here; one without rows.
RAGGED = ([642, 130, 3, 0, 300], [1, 4, 3, 0, 2])


class Step:
    """Requests of `lens` tokens, the last `rows` of them this step's rows: of each, or of all.

    What lies in the caches before is random (`_history`) or given (`fill`, `next`). Memory of
    nobody is poison. A length of 0 is a padded request. padding: rows behind the last request's.
    room: tokens that may follow. layer: has weights and a history of its own, and the same pages.
    """

    def __init__(
        self, layout: str, tp: int, lens, rows: int | Sequence[int] = 1, seed: int = 0,
        room: int = 0, layer: int = 0, exchange: bool = False, padding: int = 0,
        kv_heads: int = KV_HEADS,
    ):  # fmt: skip
        self.layout, self.tp, self.lens, self.padding = layout, tp, list(lens), padding
        self.per = [rows] * len(self.lens) if isinstance(rows, int) else list(rows)
        self.seed, self.room, self.layer, self.kv_heads = seed, room, layer, kv_heads
        self.weights = [self._weights(rank) for rank in range(tp)]
        self.shape = replace(self.weights[0].shape, exchange=exchange)
        self.weights = [replace(w, shape=self.shape) for w in self.weights]
        rows = sum(self.per) + padding
        self.hidden = random_values(seed + 1, rows, self.shape.hidden, scale=0.5).bfloat16()
        self.residual = random_values(seed + 2, rows, self.shape.hidden).bfloat16()
        self.table, self.pages = self._table(seed)
        self.batch = self._batch()
        self.caches = [self._caches() for _ in range(tp)]
        self._history()

    def _weights(self, rank: int) -> LayerWeights:
        return layer_weights(self.layout, self.tp, rank, self.layer, self.kv_heads)

    def packed(self, rank: int) -> torch.Tensor:
        """A rank's weights as the kernel takes them."""
        return self.weights[rank].packed()

    def _table(self, seed: int) -> tuple[torch.Tensor, int]:
        blocks = [-(-(n + self.room) // BLOCK) if n else 0 for n in self.lens]
        pages = sum(blocks) + SPARE
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()
        table = torch.full((len(blocks), max(max(blocks), 1) + 1), -1, dtype=torch.int32)
        for row, count in zip(table, blocks, strict=True):
            row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        return table, pages

    def _batch(self) -> Batch:
        positions, slots = [], []
        for row, n, per in zip(self.table, self.lens, self.per, strict=True):
            first = max(n - per, 0)
            positions += [min(first + i, MAX_POSITION - 1) for i in range(per)]
            slots += slots_of(row, n)[first:].tolist() if n else [-1] * per
        positions += [0] * self.padding
        slots = torch.tensor(slots + [-1] * self.padding)
        return Batch(
            torch.tensor(positions), slots, slots.clone(), self.table, int32(self.lens),
            int32([0, *itertools.accumulate(self.per)]), max(self.per), self.cos_sin(),
        )  # fmt: skip

    def cos_sin(self) -> torch.Tensor:
        config = {"rotary_dim": 64, "rope_theta": 5e6, "max_position_embeddings": MAX_POSITION}
        frequencies, scale = rope_frequencies(config)
        angle = torch.arange(MAX_POSITION).float()[:, None] * frequencies
        return torch.cat([angle.cos() * scale, angle.sin() * scale], -1)

    def _caches(self) -> reference.Caches:
        main = empty_cache(MainCache, self.pages, "nvfp4", self.shape.kv_heads, DIM, 16)
        return main, empty_cache(IndexCache, self.pages, "nvfp4", 1, DIM, 16)

    def _history(self) -> None:
        heads = self.shape.whole_kv_heads
        for request in range(len(self.lens)):
            old, seed = self.old(request), self.seed + 10 * request + 500 * self.layer
            if old:
                k, v = (random_values(seed + i, old, heads, DIM) for i in (3, 4))
                self._write(request, k, v, random_values(seed + 5, old, DIM))

    def old(self, request: int) -> int:
        """Tokens of a request before this step."""
        return max(self.lens[request] - self.per[request], 0)

    def _write(self, request: int, k, v, index_k) -> None:
        slots = slots_of(self.table[request], k.shape[0])
        for rank, (main, index) in enumerate(self.caches):
            heads = kv_head_of(rank, self.tp, self.shape.whole_kv_heads)
            mine = slice(heads.start, heads.stop)
            main.write(k[:, mine], v[:, mine], slots)
            index.write(index_k, slots)

    def next(self, caches: list[reference.Caches], hidden=None, residual=None) -> Step:
        """The step after this one, each request with as many more tokens as it has rows.

        caches: as this step left them; `room` tokens have pages. hidden, residual: else random.
        """
        found = copy.copy(self)
        found.seed = self.seed + 1000
        found.lens = [n + per if n else 0 for n, per in zip(self.lens, self.per, strict=True)]
        found.batch = found._batch()
        found.caches = caches
        rows = self.batch.rows
        made = (random_values(found.seed + i, rows, self.shape.hidden).bfloat16() for i in (1, 2))
        found.hidden, found.residual = (
            new if given is None else given
            for new, given in zip(made, (hidden, residual), strict=True)
        )
        return found

    def alone(self, request: int, row: int | None = None) -> Step:
        """The same step of one of its requests, or of one of its rows alone."""
        found, b = copy.copy(self), self.batch
        first, behind = b.starts[request : request + 2].tolist()
        rows = slice(first, behind) if row is None else slice(row, row + 1)
        count = rows.stop - rows.start
        found.lens, found.per = [self.lens[request] - (behind - rows.stop)], [count]
        found.hidden, found.residual = self.hidden[rows], self.residual[rows]
        found.table, found.padding = self.table[request : request + 1], 0
        found.batch = Batch(
            b.positions[rows], b.main_slots[rows], b.index_slots[rows], found.table,
            int32(found.lens), int32([0, count]), count, b.cos_sin,
        )  # fmt: skip
        return found

    def fill(self, state, count: int) -> None:
        """The first request's first `count` tokens as the whole-model reference holds them."""
        parts = (state.keys, state.values, state.index_keys)
        self._write(0, *[part[:count] for part in parts])

    def prompt(self, request: int) -> torch.Tensor:
        """Hidden states of a request's tokens before this step."""
        return random_values(self.seed + 77, self.old(request), self.shape.hidden).bfloat16()

    def copies(self, caches=None) -> list[reference.Caches]:
        """Copies of `caches`, by default as they are before the step."""
        found = []
        for main, index in self.caches if caches is None else caches:
            pages = [c.pages.clone() for c in (main, index)]
            found.append(
                (
                    MainCache.from_tensor(pages[0], self.shape.kv_heads, "nvfp4", head_dim=DIM),
                    IndexCache.from_tensor(pages[1], "nvfp4", head_dim=DIM),
                )
            )
        return found

    def reference(self, caches=None) -> list[reference.Regions]:
        caches = self.copies() if caches is None else caches
        return reference.layer(self.weights, self.batch, caches, self.hidden, self.residual)

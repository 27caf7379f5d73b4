"""Calls of qkv_insert's gfx950 kernel in the emulator, and how their results are compared.

Bytes are compared exactly: each key head is also a query head of the same call, which shows the
value that was encoded; the whole row of every block is compared, the bytes beside the page too.
Queries may differ from the reference's by one unit in the last place of the activation dtype, since
the sum of squares has another order and rsqrt is the hardware's: TOLERANCE, relative; the absolute
part covers a cos - b sin that cancels.
"""

from __future__ import annotations

import dataclasses

import torch

from gfx950_emu import Schedule
from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.ops import Heads, Norms, qkv_insert
from rocm_msa.ops.qkv_insert import flydsl_gfx950
from tests.launcher.emulated import assert_clean, emulated
from tests.ops.cases import empty_cache, queries
from tests.ops.test_qkv_insert import MAX_POSITION, norms_of, table_of

TP4, SMALL = Heads(16, 1, 1, 128, 64), Heads(4, 2, 2, 32, 16)
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}
RANDOM = Schedule("random", 5, (1, 300))
BLOCKS = 5


class Step:
    """One call over poisoned caches; its key heads are its first query heads as well."""

    def __init__(
        self, tokens=9, heads=TP4, main="nvfp4", index="nvfp4", dtype=torch.bfloat16, gap=32, seed=0
    ):
        self.heads, self.tokens, self.gap = heads, tokens, gap
        self.kinds = {"main": main, "index": index}
        self.qkv = queries(seed + 1, tokens, heads.qkv_columns, dtype=dtype)
        w = norms_of(heads, seed + 50, dtype)
        self.norms = Norms(w.k, w.k, w.index_k, w.index_k)
        self.cos_sin = table_of(heads)
        order = torch.Generator().manual_seed(seed + 2)
        self.positions = torch.randint(0, MAX_POSITION, (tokens,), generator=order)
        self.main_slots = torch.randperm(BLOCKS * 128, generator=order)[:tokens]
        self.index_slots = torch.randperm(BLOCKS * 128, generator=order)[:tokens]
        self.scales = {}

    @property
    def fused(self) -> torch.Tensor:
        """View of qkv, [tokens, heads of the projection, head_dim]."""
        return self.qkv.view(self.tokens, -1, self.heads.head_dim)

    def share_keys(self) -> None:
        h, x = self.heads, self.fused
        x[:, : h.kv] = x[:, h.q : h.q + h.kv].clone()
        if h.index:
            x[:, h.q + 2 * h.kv] = x[:, -1].clone()

    def caches(self):
        h = self.heads
        main = empty_cache(MainCache, BLOCKS, self.kinds["main"], h.kv, h.head_dim, self.gap)
        main.scales.update({k: v for k, v in self.scales.items() if k in main.scales})
        if not h.index:
            return main, None
        index = empty_cache(IndexCache, BLOCKS, self.kinds["index"], 1, h.head_dim, self.gap)
        index.scales["k"] = self.scales.get("index", 1.0)
        return main, index

    def arguments(self, main, index) -> tuple:
        has = self.heads.index > 0
        norms = self.norms if has else dataclasses.replace(self.norms, index_q=None, index_k=None)
        return (
            self.qkv, norms, self.cos_sin, self.positions, main, index if has else None,
            self.main_slots, self.index_slots if has else None, self.heads,
        )  # fmt: skip


def whole_rows(cache) -> torch.Tensor:
    """The cache's memory, the gaps beside its pages included."""
    storage = cache.pages.untyped_storage()
    return torch.tensor([], dtype=torch.uint8).set_(storage)


def run(step: Step, schedule: Schedule = RANDOM, op=qkv_insert):
    """(q, index_q, main, index, report) of the kernel."""
    main, index = step.caches()
    arguments = step.arguments(main, index)
    options = {"backend": "flydsl"} if op is qkv_insert else {}
    with emulated(flydsl_gfx950.needs(*arguments), schedule=schedule) as reports:
        q, index_q = op(*arguments, **options)
    assert_clean(reports, launches=1)
    return q, index_q, main, index, reports[0]


def check(step: Step, schedule: Schedule = RANDOM, op=qkv_insert, live=slice(None)):
    """Run, compare queries with the reference and bytes with the encoding; gives the report.

    live: the tokens that are written."""
    step.share_keys()
    h = step.heads
    q, index_q, main, index, report = run(step, schedule, op)
    want_main, want_index = step.caches()
    v = step.fused[live, h.q + h.kv : h.q + 2 * h.kv]
    want_main.write(q[live, : h.kv], v, step.main_slots[live])
    assert torch.equal(whole_rows(main), whole_rows(want_main))
    if h.index:
        want_index.write(index_q[live, 0], step.index_slots[live])
        assert torch.equal(whole_rows(index), whole_rows(want_index))
    want = qkv_insert(*step.arguments(*step.caches()), backend="reference")
    tolerance = TOLERANCE[step.qkv.dtype]
    for got, reference in zip((q, index_q), want, strict=True):
        if got is not None:
            close = {"rtol": tolerance, "atol": max(tolerance * 1e-2, 1e-6), "equal_nan": True}
            torch.testing.assert_close(got, reference, **close)
    return report

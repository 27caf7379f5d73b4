"""Calls of sparse_decode's gfx950 kernels in the emulator, and how their results are compared.

The reference has the same roundings of operands (reference_fp8.py): what is left is the order of
the fp32 sums, v_exp_f32, p on the edge of a rounding (a step of 2^-8 of p), the rounding of what a
page gives to fp16 (2^-11 of it; not of bf16 pages), and the rounding of the result to q's dtype:
half a unit of that dtype, and TOLERANCE of the largest value for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gfx950_emu import Checks
from rocm_msa.cache import MainCache
from rocm_msa.ops.sparse_decode import flydsl_gfx950 as module
from rocm_msa.ops.sparse_decode import reference_fp8
from tests.launcher.emulated import assert_clean, emulated
from tests.ops.cases import int32, make_batch, queries
from tests.ops.test_sparse_decode import random_ids

DIM = 128
HALF_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TOLERANCE = 2.0**-10


@dataclass
class Call:
    """Arguments of sparse_decode."""

    q: torch.Tensor
    cache: MainCache
    ids: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    rows_per_request: int = 1
    scale: float = DIM**-0.5

    @property
    def arguments(self) -> tuple:
        return (
            self.q, self.cache, self.ids, self.table, self.lens, self.rows_per_request, self.scale
        )  # fmt: skip

    def run(self, parts=None, schedule=None, checks=Checks.ALL, **options):
        """((out, lse), reports of the launches); no finding.

        parts: of the dims, or "shared" for the kernels that take a page once for all rows.
        """
        options |= {"shared_pages": True} if parts == "shared" else {"parts": parts}
        builds = module.needs(*self.arguments, **options)
        with emulated(builds, schedule=schedule, checks=checks) as reports:
            result = module.run(*self.arguments, **options)
        assert_clean(reports, launches=len(builds))
        return result, [report.launches[0] for report in reports]

    def reference(self, fold: int = 0):
        return reference_fp8.run(*self.arguments, fold=fold)

    def row(self, row: int) -> Call:
        """One row alone, as a request of one row."""
        request, step = divmod(row, self.rows_per_request)
        n = max(0, int(self.lens[request]) - self.rows_per_request + step + 1)
        return replace(
            self,
            q=self.q[row : row + 1],
            ids=self.ids[:, row : row + 1],
            table=self.table[request : request + 1],
            lens=int32([n]),
            rows_per_request=1,
        )


def make_call(lens, rows_per_request=1, *, group=16, topk=16, q_dtype=torch.bfloat16, **options):
    """A batch of random values in shuffled pages, with random lists."""
    batch = make_batch(lens, head_dim=DIM, **options)
    seed = options.get("seed", 0)
    rows = len(lens) * rows_per_request
    ids, _ = random_ids(batch, rows_per_request, topk, seed)
    q = queries(seed + 3, rows, batch.main.kv_heads * group, DIM, dtype=q_dtype)
    return Call(q, batch.main, ids, batch.table, batch.seq_lens, rows_per_request)


def assert_close(got, want) -> None:
    out, lse = got
    wanted, wanted_lse = want
    assert not out.isnan().any() and not lse.isnan().any()
    assert torch.equal(lse == -torch.inf, wanted_lse == -torch.inf)
    limit = HALF_UNIT[out.dtype] * wanted.abs() + TOLERANCE * wanted.abs().max()
    worst = ((out.float() - wanted).abs() - limit).max()
    assert worst <= 0, f"{worst} above the tolerance"
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-4)


def check(call: Call, parts=None, fold: int = 0, **options):
    result, reports = call.run(parts, fold=fold, **options)
    assert_close(result, call.reference(fold))
    return result, reports


def full(requests: int, rows: int, **options) -> Call:
    """Requests of 16 full blocks, all of them selected."""
    return make_call([2048] * requests, rows, kv_heads=1, **options)

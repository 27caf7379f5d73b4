"""sparse_decode's gfx950 kernels: exact counts from the emulator, MODELLED times, beside two peers.

    python benchmarks/bench_flydsl_decode.py [--cases 32x4,128x1] [--json FILE]

    ours            NVFP4 pages, as compiled and launched by the product
    ours, shared    the same with shared_pages: a page is dequantised once
    copy + FP8      every selected page of every row becomes an FP8 page, then our kernel on those
    dedup + FP8     the same with every page converted once, and shared by the second step

One KV head of 16 query heads (a rank at TP4), 16 blocks of 128 keys, all selected. A modelled time
is the largest of the pipes' and the memory's times (gfx950_emu/README.md), summed over launches;
it knows no latency and no launch cost. `floor` is the least bytes at the datasheet's HBM bandwidth.
Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.flydsl_convert import Convert
from gfx950_emu import Checks
from rocm_msa import launcher
from rocm_msa.aot import ServingConfig
from rocm_msa.arch import GFX950
from rocm_msa.cache import CacheDType, MainCache
from rocm_msa.formats import nvfp4_lut
from rocm_msa.ops.sparse_decode import flydsl_gfx950 as decode
from tests.launcher.emulated import emulated
from tests.ops.cases import int32, make_batch, queries

BLOCKS, BLOCK, DIM, HEADS = 16, 128, 128, 16
CASES = "1x1,8x1,32x1,32x4,64x1,128x1,128x4"
CPU = torch.device("cpu")


@dataclass
class Work:
    """The arguments of one call of sparse_decode."""

    q: torch.Tensor
    cache: MainCache
    ids: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    rows_per_request: int
    shared_pages: bool = False

    def attend(self):
        return decode.run(
            self.q, self.cache, self.ids, self.table, self.lens, self.rows_per_request, DIM**-0.5,
            shared_pages=self.shared_pages,
        )[0]  # fmt: skip


def make_work(requests: int, rows: int) -> Work:
    batch = make_batch([BLOCKS * BLOCK] * requests, head_dim=DIM, kv_heads=1)
    ids = torch.arange(BLOCKS, dtype=torch.int32).expand(1, requests * rows, BLOCKS).contiguous()
    q = queries(1, requests * rows, HEADS, DIM)
    return Work(q, batch.main, ids, batch.table, batch.seq_lens, rows)


def least_bytes(work: Work) -> int:
    """Pages once each, q, out, lse, lists, tables, lengths."""
    pages = work.table.unique().numel() * work.cache.page.page_bytes
    rest = (work.ids, work.table, work.lens, work.q, work.q)
    lse = work.q.shape[0] * HEADS * 4
    return pages + lse + sum(x.numel() * x.element_size() for x in rest)


def convert(work: Work, listed: torch.Tensor) -> MainCache:
    """The listed pages as an FP8 cache of their own."""
    cache = MainCache.allocate(len(listed), 1, CacheDType.FP8, head_dim=DIM)
    launcher.launch(
        Convert(), (len(listed), 1),
        [work.cache.pages, work.cache.block_stride, nvfp4_lut.build(), listed,
         cache.pages, cache.block_stride],
        CPU,
    )  # fmt: skip
    return cache


def by_copies(work: Work) -> Work:
    """A copy of each (row, slot)'s page: rows become requests of one row."""
    rows, per = work.q.shape[0], work.rows_per_request
    request = torch.arange(rows) // per
    listed = work.table[request, :BLOCKS].flatten().contiguous()
    table = torch.arange(rows * BLOCKS, dtype=torch.int32).view(rows, BLOCKS)
    lens = int32([int(work.lens[r // per]) - per + r % per + 1 for r in range(rows)])
    return Work(work.q, convert(work, listed), work.ids, table, lens, 1)


def deduplicated(work: Work) -> Work:
    listed = work.table[:, :BLOCKS].flatten().contiguous()
    table = torch.arange(len(listed), dtype=torch.int32).view(-1, BLOCKS)
    cache = convert(work, listed)
    return Work(work.q, cache, work.ids, table, work.lens, work.rows_per_request)


def counted(requests: int, rows: int, step) -> tuple[dict, torch.Tensor]:
    """Counts of all launches of `step(work).attend()`, and its result."""
    work = make_work(requests, rows)
    served = [
        ServingConfig(HEADS, 1, 1, DIM, 64, kind, kind)
        for kind in (CacheDType.NVFP4, CacheDType.FP8)
    ]
    builds = [Convert(), *(build for config in served for build in decode.builds(config))]
    with emulated(builds, checks=Checks.NONE) as reports:
        out = step(work).attend()
    launches = [report.launches[0] for report in reports]
    found = {
        "modelled_us": sum(x.model_time()["bound"] for x in launches) * 1e6,
        "hbm_bytes": sum(x.hbm_bytes for x in launches),
        "launches": [
            {"kernel": x.kernel, **{k: v * 1e6 for k, v in x.model_time().items()}}
            for x in launches
        ],
    }
    return found, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=CASES, help="requests x rows, by commas")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    peers = {
        "ours": lambda work: work,
        "ours, shared": lambda work: replace(work, shared_pages=True),
        "copy + FP8": by_copies,
        "dedup + FP8": deduplicated,
    }
    print(
        "MODELLED microseconds, gfx950; HBM: bytes over what a call must move, pages and the rest"
    )
    print(
        f"{'case':>8} {'floor':>7} " + " ".join(f"{name:>12}" for name in peers) + "   HBM of each"
    )
    results = []
    for case in options.cases.split(","):
        requests, rows = map(int, case.split("x"))
        least = least_bytes(make_work(requests, rows))
        floor = least / GFX950.hbm_bytes_per_s * 1e6
        found, outs = {}, []
        for name, step in peers.items():
            found[name], out = counted(requests, rows, step)
            outs.append(out)
        for out in outs[1:]:  # the same table, so the same values: only sums are ordered otherwise
            assert (out.float() - outs[0].float()).abs().max() <= 2.0**-7 * outs[0].abs().max()
        times = " ".join(f"{found[name]['modelled_us']:12.2f}" for name in peers)
        shares = " ".join(f"{found[name]['hbm_bytes'] / least:6.2f}" for name in peers)
        print(f"{case:>8} {floor:7.2f} {times} {shares}", flush=True)
        results.append({"requests": requests, "rows": rows, "floor_us": floor, **found})
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

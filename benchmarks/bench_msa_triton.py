"""Benchmark of the MSA ops in Triton at the shapes of a TP4 rank, beside peers and floors.

    python benchmarks/bench_msa_triton.py [--only decode,score,...] [--out DIR]

One process, one card: ours, vLLM 0.33's Triton kernels for M3 (when their sources are unpacked),
convert-then-attend, and the floor: the bytes that must move at the read bandwidth measured first.
Writes DIR/msa_triton.json and .png. Without a GPU it says so and ends with code 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SCALE = 128**-0.5
NVFP4_PAGE, NVFP4_INDEX_PAGE = 18432, 9216
DECODE = ((1, 1), (8, 1), (32, 1), (32, 4), (128, 1), (128, 4), (256, 1))
SCORE = ((1, 4, 131072, 1), (1, 4, 524288, 4), (45, 4, 114688, 1), (45, 4, 114688, 4))


@dataclass(frozen=True)
class Row:
    """One measurement, microseconds a call."""

    op: str
    case: str
    who: str
    median: float
    low: float
    high: float
    floor: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="decode,score,prefill,dense,insert,shared")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--commit", default=_commit(), help="to name in the report")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_msa_triton: no GPU here, nothing measured")
        return
    from benchmarks import roofline

    facts = {
        "commit": options.commit,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "read_TB_s": roofline.read_bandwidth() / 1e12,
        "copy_TB_s": roofline.copy_bandwidth() / 1e12,
    }
    print(facts)
    rows: list[Row] = []
    for name in options.only.split(","):
        for row in SECTIONS[name]():
            rows.append(row)
            times = f"{row.median:9.1f} ({row.low:.1f}..{row.high:.1f})"
            print(f"{row.op:14} {row.case:22} {row.who:18} {times:28} floor {row.floor:8.1f}")
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"facts": facts, "rows": [asdict(r) for r in rows]}
    (options.out / "msa_triton.json").write_text(json.dumps(report, indent=1))
    _plot(rows, options.out / "msa_triton.png")


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def _measure(op: str, case: str, floor: float, peers: dict[str, Callable[[], list]]):
    from benchmarks.timing import graph_time

    for who, calls in peers.items():
        try:
            t = graph_time(calls())
        except Exception as error:
            print(f"{op} {case} {who}: {type(error).__name__}: {str(error)[:200]}")
            continue
        yield Row(op, case, who, t.median, t.low, t.high, floor)


def decode():
    from benchmarks import cases, peers, roofline, timing
    from rocm_msa.ops import sparse_decode

    vllm = peers.load("sparse_attn")
    for requests, rows in DECODE:
        nbytes = requests * rows * cases.TOPK * NVFP4_PAGE
        copies = timing.copies_for(nbytes, 64)
        pages = min(copies * requests * rows * cases.TOPK, 40000)
        caches = {d: cases.main_cache(pages, d) for d in ("nvfp4", "fp8", "bf16")}
        work = cases.decode_calls(requests, rows, copies, pages)
        out = torch.empty_like(work[0].q)

        def ours(cache, work=work, rows=rows, out=out):
            return [
                lambda c=c: sparse_decode(
                    c.q, cache, c.ids, c.table, c.lens, rows, SCALE, out=out, backend="triton"
                )
                for c in work
            ]

        table = {f"ours {d}": lambda d=d, caches=caches: ours(caches[d]) for d in caches}
        if vllm:
            for d, dtype in (("fp8", torch.float8_e4m3fn), ("bf16", torch.bfloat16)):
                pool = torch.randn(pages, 1, 128, 256, device="cuda").to(dtype)
                table[f"vLLM {d}"] = lambda pool=pool, work=work, rows=rows, out=out: [
                    lambda c=c: vllm.minimax_m3_sparse_attn_decode(
                        c.q, pool, c.ids, c.table, c.lens, 1, SCALE, out, rows
                    )
                    for c in work
                ]
            items = requests * rows * cases.TOPK
            buffer = torch.empty(items, 1, 128, 256, dtype=torch.float8_e4m3fn, device="cuda")
            own = torch.arange(items, device="cuda", dtype=torch.int32).view(requests, -1)

            def convert(c, nvfp4=caches["nvfp4"], buffer=buffer, own=own, rows=rows, out=out):
                peers.dequantize_blocks(nvfp4, c.ids, c.table, rows, buffer)
                vllm.minimax_m3_sparse_attn_decode(
                    c.q, buffer, c.ids, own, c.lens, 1, SCALE, out, rows
                )

            table["convert + vLLM fp8"] = lambda work=work, convert=convert: [
                lambda c=c: convert(c) for c in work
            ]
        yield from _measure("sparse_decode", f"{requests}x{rows}", roofline.floor_us(nbytes), table)


def score():
    from benchmarks import cases, peers, roofline, timing
    from rocm_msa.ops import block_topk, index_score_decode

    vllm = peers.load("index_topk")
    for requests, rows, context, heads in SCORE:
        blocks = context // 128
        nbytes = requests * blocks * NVFP4_INDEX_PAGE
        copies = timing.copies_for(nbytes, 32)
        pages = copies * requests * blocks
        order = torch.randperm(pages, device="cuda").int().view(copies, requests, blocks)
        q = torch.randn(requests * rows, heads, 128, device="cuda").bfloat16()
        lens = torch.full((requests,), context, dtype=torch.int32, device="cuda")
        nb = torch.full((requests * rows,), blocks, dtype=torch.int32, device="cuda")
        out = torch.empty(heads, requests * rows, blocks, device="cuda")
        ids = torch.empty(heads, requests * rows, 16, dtype=torch.int32, device="cuda")
        cache = cases.index_cache(pages, "nvfp4")

        def run(t, select, q=q, cache=cache, lens=lens, rows=rows, nb=nb, out=out, ids=ids):
            index_score_decode(q, cache, t, lens, rows, out=out, backend="triton")
            if select:
                block_topk(out, nb, 16, out=ids, backend="triton")

        table = {
            "ours": lambda order=order, run=run: [lambda t=t: run(t, False) for t in order],
            "ours + select": lambda order=order, run=run: [lambda t=t: run(t, True) for t in order],
        }
        if vllm:
            pool = torch.empty(pages, 128, 128, dtype=torch.float8_e4m3fn, device="cuda")
            pool.view(torch.uint8).random_(0, 0x40)
            size = (q, pool)
            same = (lens, context)

            def vscore(t, size=size, same=same, heads=heads, rows=rows, out=out):
                vllm.minimax_m3_index_decode_score(
                    *size, t, *same, 0, 1, heads, rows, rows, score_out=out
                )

            def vboth(t, size=size, same=same, heads=heads, rows=rows, out=out):
                vllm.minimax_m3_index_decode(
                    *size, t, *same, 16, 0, 1, heads, rows, rows, score_out=out
                )

            for who, call in (("vLLM fp8", vscore), ("vLLM fp8 + select", vboth)):
                table[who] = lambda call=call, order=order: [lambda t=t: call(t) for t in order]
        case = f"{requests}x{rows} {context // 1024}K h{heads}"
        yield from _measure("index_score", case, roofline.floor_us(nbytes), table)
        del cache, table, run


def prefill():
    from benchmarks import prefill_cases

    for case in prefill_cases.prefill():
        yield from _measure(*case)


def dense():
    from benchmarks import prefill_cases

    for case in prefill_cases.dense():
        yield from _measure(*case)


def insert():
    from benchmarks import roofline, timing
    from rocm_msa import ops
    from rocm_msa.cache import IndexCache, MainCache

    heads = ops.Heads(q=16, kv=1, index=1, head_dim=128, rotary_dim=64)
    norms = ops.Norms(*torch.zeros(4, 128, device="cuda").bfloat16())
    for tokens in (1, 128, 2048, 8192, 32768):
        main = MainCache.allocate(-(-tokens // 128), 1, "nvfp4", "cuda")
        index = IndexCache.allocate(-(-tokens // 128), "nvfp4", "cuda")
        nbytes = tokens * (20 * 256 + 17 * 256 + 3 * 72)
        shape = (tokens, heads.qkv_columns)
        inputs = [
            torch.randn(shape, device="cuda").bfloat16()
            for _ in range(timing.copies_for(nbytes, 32))
        ]
        cos_sin = torch.randn(tokens, 64, device="cuda")
        at = torch.arange(tokens, device="cuda")

        def run(x, main=main, index=index, cos_sin=cos_sin, at=at):
            return ops.qkv_insert(
                x, norms, cos_sin, at, main, index, at, at, heads, backend="triton"
            )

        table = {"ours": lambda inputs=inputs, run=run: [lambda x=x: run(x) for x in inputs]}
        written = tokens * (17 * 256 + 3 * 72)
        half = [x.view(torch.uint8).flatten()[: nbytes // 2] for x in inputs]
        to = torch.empty_like(half[0])
        table["copy of as many bytes"] = lambda half=half, to=to: [
            lambda x=x: to.copy_(x) for x in half
        ]
        floors = f"read {roofline.floor_us(nbytes):.1f} us, copy {roofline.copy_us(nbytes):.1f} us"
        print(f"qkv_insert {tokens}: {nbytes} bytes, {written} of them written; floors: {floors}")
        yield from _measure("qkv_insert", f"{tokens}", roofline.floor_us(nbytes), table)


def shared():
    """64 requests whose rows all selected the same pages of a prefix, and pages of their own."""
    from benchmarks import cases, roofline, timing
    from rocm_msa.ops import sparse_decode

    for rows in (1, 4):
        nbytes = 64 * rows * cases.TOPK * NVFP4_PAGE
        copies = timing.copies_for(nbytes, 16)
        cache = cases.main_cache(copies * 64 * rows * cases.TOPK, "nvfp4")
        work = cases.decode_calls(64, rows, copies, cache.num_blocks)
        out = torch.empty_like(work[0].q)

        def calls(work=work, cache=cache, rows=rows, out=out, same=False, hint=False):
            if same:
                for c in work:
                    c.table.copy_(c.table[:1].clone().expand_as(c.table))
                    c.ids.copy_(c.ids[:, :1].clone().expand_as(c.ids))
            return [
                lambda c=c: sparse_decode(
                    c.q, cache, c.ids, c.table, c.lens, rows, SCALE, out=out, shared_pages=hint,
                    backend="triton",
                )
                for c in work
            ]  # fmt: skip

        table = {
            "own pages": calls,
            "own pages, hint": lambda calls=calls: calls(hint=True),
            "shared pages": lambda calls=calls: calls(same=True),
            "shared pages, hint": lambda calls=calls: calls(same=True, hint=True),
        }
        yield from _measure("shared", f"64x{rows}", roofline.floor_us(nbytes), table)


SECTIONS = {
    "decode": decode,
    "score": score,
    "prefill": prefill,
    "dense": dense,
    "insert": insert,
    "shared": shared,
}


def _plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys((r.op, r.case) for r in rows))
    figure, axes = plt.subplots(figsize=(9, 0.34 * len(cases) + 1.5))
    for number, who in enumerate(dict.fromkeys(r.who for r in rows)):
        points = [(cases.index((r.op, r.case)), r.median / r.floor) for r in rows if r.who == who]
        x, y = [x for _, x in points], [y for y, _ in points]
        axes.plot(x, y, "os"[number // 10 % 2], label=who, markersize=5)  # ten colours
    axes.axvline(1.0, color="grey", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(cases)), [f"{op} {case}" for op, case in cases])
    axes.invert_yaxis()
    axes.set_xlabel("time over the byte floor (1 = limit of the memory)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()

"""KV transfer of full-model rows over NIXL: one descriptor a run of blocks against one a page.

    python benchmarks/bench_transfer.py [--tokens 16384 65536] [--tls tcp] [--json FILE]

Two processes with synthetic rows of MiniMax-M3 at TP 4 (1,631,232 bytes a block with NVFP4 caches):
a prefill process that only serves, and a decode process that reads one request after the other.

    rows      what RocmMsaNixlConnector posts: adjacent blocks merged
    pages     what vLLM's NIXL connector posts for these caches: one descriptor a page and block,
              from lists prepared once, by index (117 a block)

Blocks are adjacent ("fresh") or in random order on both sides ("mixed": rows cannot be merged).
Seconds are from the first call to the last byte, with the making of descriptors; CPU seconds are
those of both processes together; `ms`, `best` (the quickest repeat), `post` (until the call that
posts returned) and `CPU` are milliseconds. The transport is what UCX finds (shared memory on one
host), or `--tls`. Memory is host memory: the ratios say what descriptors cost here, not what a
GPU's network card would reach.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.outer_block import OuterBlockRow
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.vllm_plugin.nixl.agent import BUSY, DONE, Read, RowAgent
from rocm_msa.vllm_plugin.nixl.options import TransferOptions
from rocm_msa.vllm_plugin.nixl.plan import Piece, descriptors

TP = 4
SPARE_BLOCKS = 16
LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Result:
    """Medians over the repeats, a request; `best_seconds` is the quickest one."""

    tokens: int
    blocks: str
    path: str
    descriptors: int
    nbytes: int
    seconds: float
    best_seconds: float
    post_seconds: float
    cpu_seconds: float

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9


def rows_of(dtype: str) -> OuterBlockRow:
    parsed = CacheDType.parse(dtype)
    return OuterBlockRow.of(MINIMAX_M3, MINIMAX_M3.shard(TP), parsed, parsed)


def options(progress: str) -> TransferOptions:
    return TransferOptions(nixl_progress=progress)


def serve(pipe: Any, nbytes: int, progress: str) -> None:
    """The prefill process: registers rows of known bytes, answers questions until it is told."""
    data = torch.arange(nbytes // 8, dtype=torch.int64).view(torch.uint8)
    agent = RowAgent(options(progress), "cpu")
    agent.register(data.data_ptr(), nbytes, 0)
    pipe.send((agent.metadata(), data.data_ptr()))
    while pipe.recv() != "end":
        pipe.send(time.process_time())
    agent.close()


class Reader:
    """The decode process."""

    def __init__(self, row: OuterBlockRow, blocks: int, pipe: Any, progress: str):
        self.row, self.blocks, self.pipe = row, blocks, pipe
        self.data = torch.zeros(blocks * row.nbytes, dtype=torch.uint8)
        self.agent = RowAgent(options(progress), "cpu")
        self.agent.register(self.data.data_ptr(), self.data.numel(), 0)
        metadata, self.remote_base = pipe.recv()
        self.name = self.agent.connect(metadata)
        self._prepare_pages()

    def _prepare_pages(self) -> None:
        """Lists of every page of every block, page after page, as at a handshake."""
        lists = []
        for base in (self.data.data_ptr(), self.remote_base):
            parts = []
            for page in self.row.pages:
                starts = base + page.offset + np.arange(self.blocks) * self.row.nbytes
                parts.append(
                    np.stack(
                        [starts, np.full_like(starts, page.page.page_bytes), np.zeros_like(starts)],
                        axis=1,
                    )
                )
            lists.append(np.concatenate(parts).astype(np.uint64))
        with self.agent._lock:
            nixl = self.agent._agent
            self._local_pages = nixl.prep_xfer_dlist("NIXL_INIT_AGENT", lists[0], "DRAM")
            self._remote_pages = nixl.prep_xfer_dlist(self.name, lists[1], "DRAM")

    def post_rows(self, local: list[int], remote: list[int]) -> Read:
        n = self.row.nbytes
        here, there = descriptors(
            [Piece(0, 0, 0, n)], self.data.data_ptr(), n, local, self.remote_base, n, remote
        )
        return self.agent.read(self.name, here, there, 0, 0)

    def post_pages(self, local: list[int], remote: list[int]) -> Read:
        starts = np.arange(len(self.row.pages))[:, None] * self.blocks
        here = (starts + np.asarray(local)[None, :]).ravel()
        there = (starts + np.asarray(remote)[None, :]).ravel()
        with self.agent._lock:
            nixl = self.agent._agent
            handle = nixl.make_prepped_xfer(
                "READ", self._local_pages, here, self._remote_pages, there, b""
            )
            if nixl.transfer(handle) == "ERR":
                raise RuntimeError("the read could not be posted")
        return Read(handle, len(here), len(local) * self.row.nbytes)

    def cpu(self) -> float:
        """CPU seconds of both processes so far."""
        self.pipe.send("cpu")
        return time.process_time() + self.pipe.recv()

    def one(
        self, path: str, local: list[int], remote: list[int]
    ) -> tuple[float, float, float, int]:
        """(seconds, seconds until posted, CPU seconds, descriptors) of one request."""
        cpu, start = self.cpu(), time.perf_counter()
        post = self.post_rows if path == "rows" else self.post_pages
        read = post(local, remote)
        posted = time.perf_counter()
        while (state := self.agent.state(read)) == BUSY:
            if time.perf_counter() - start > LIMIT_SECONDS:
                raise RuntimeError(f"not read in {LIMIT_SECONDS} s")
            time.sleep(0.0005)
        seconds = time.perf_counter() - start
        if state != DONE:
            raise RuntimeError("the read failed")
        count = read.descriptors
        self.agent.release(read)
        return seconds, posted - start, self.cpu() - cpu, count

    def check(self, local: list[int], remote: list[int]) -> None:
        """The bytes of the last request are the prefill process's."""
        words = self.data.view(torch.int64).view(self.blocks, -1)
        for here, there in ((local[0], remote[0]), (local[-1], remote[-1])):
            first = there * words.shape[1]
            if words[here, 0] != first or words[here, -1] != first + words.shape[1] - 1:
                raise RuntimeError(f"block {here} does not hold remote block {there}")
            words[here, 0] = words[here, -1] = -1


def measure(reader: Reader, tokens: int, repeats: int) -> list[Result]:
    count, out = tokens // BLOCK_TOKENS, []
    for pattern in ("fresh", "mixed"):
        generator = random.Random(0)
        for path in ("rows", "pages"):
            samples = []
            for repeat in range(repeats + 1):
                local, remote = list(range(1, count + 1)), list(range(3, count + 3))
                if pattern == "mixed":
                    generator.shuffle(local)
                    generator.shuffle(remote)
                sample = reader.one(path, local, remote)
                reader.check(local, remote)
                if repeat:  # the first one connects and touches memory
                    samples.append(sample)
            seconds, post, cpu, made = (
                statistics.median(column) for column in zip(*samples, strict=True)
            )
            nbytes = count * reader.row.nbytes
            best = min(sample[0] for sample in samples)
            out.append(Result(tokens, pattern, path, int(made), nbytes, seconds, best, post, cpu))
    return out


def report(results: list[Result]) -> str:
    lines = [
        "| tokens | blocks | path | descriptors | MB | ms | best | post | CPU | req/s | GB/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r.tokens:,} | {r.blocks} | {r.path} | {r.descriptors:,} | {r.nbytes / 1e6:,.0f} "
            f"| {r.seconds * 1e3:.1f} | {r.best_seconds * 1e3:.1f} | {r.post_seconds * 1e3:.1f} "
            f"| {r.cpu_seconds * 1e3:.1f} "
            f"| {1 / r.seconds:.2f} | {r.gb_per_second:.2f} |"
        )
    lines += [
        "",
        "| tokens | blocks | ms, pages / rows | best | CPU |",
        "|---|---|---|---|---|",
    ]
    for rows, pages in zip(results[::2], results[1::2], strict=True):
        lines.append(
            f"| {rows.tokens:,} | {rows.blocks} | {pages.seconds / rows.seconds:.2f} "
            f"| {pages.best_seconds / rows.best_seconds:.2f} "
            f"| {pages.cpu_seconds / rows.cpu_seconds:.2f} |"
        )
    return "\n".join(lines)


def environment(args: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "nixl": __import__("importlib.metadata").metadata.version("nixl"),
        "command": " ".join(sys.argv),
        "tls": args.tls or "UCX's choice",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--dtype", default="nvfp4", help="of both caches")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tls", help="UCX_TLS of both processes, e.g. tcp")
    parser.add_argument("--progress", choices=("poll", "thread"), default="poll")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.tls:
        os.environ["UCX_TLS"] = args.tls
    row = rows_of(args.dtype)
    blocks = max(args.tokens) // BLOCK_TOKENS + SPARE_BLOCKS
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(
        target=serve, args=(theirs, blocks * row.nbytes, args.progress), daemon=True
    )
    child.start()
    try:
        reader = Reader(row, blocks, pipe, args.progress)
        results = [r for tokens in args.tokens for r in measure(reader, tokens, args.repeats)]
        pipe.send("end")
        child.join(timeout=10)
    finally:
        child.kill()
    facts = environment(args)
    print(f"rows of {row.nbytes:,} bytes, {len(row.pages)} pages; {facts}")
    print(report(results))
    if args.json:
        args.json.write_text(json.dumps([facts, [asdict(r) for r in results]], indent=2))


if __name__ == "__main__":
    main()

"""Run as a script: groups of real processes over gloo, a scenario each; the answers go to a file.

python run_gloo.py OUTPUT.json SCENARIO...

The processes are forks of this one, which has imported torch and holds no threads. Every process
writes what its scenario returns, or the error that it met.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dcp.api import DcpError
from dcp.gloo import GlooExchange
from dcp.plan import Results
from rocm_msa.ops import block_topk, index_score_decode
from rocm_msa.ops.rows import decode_rows
from tests.ops.cases import make_batch, queries

HEADS, DIM = 4, 32
DEADLINE_S = 300
GONE = 9
"""Exit status of a process that a scenario ends early."""

# (lengths, rows a request): batches that grow and shrink, padding, nothing at all
BATCHES = [
    ([700, 0, 128 * 40, 129], 1),
    ([128 * 17 + 2, 5], 4),
    ([0, 0], 2),
    ([], 1),
    ([1], 9),
    ([128 * 35, 3000, 1, 0, 127], 3),
]


def batch_of(seed: int, lens: list[int], rows: int):
    """(arguments of select after the queries, all heads' queries)."""
    batch = make_batch(lens, seed=seed)
    num_blocks = decode_rows(batch.seq_lens, rows).num_blocks.int()
    index_q = queries(seed, rows * len(lens), HEADS, DIM)
    return (batch.index, batch.table, batch.seq_lens, rows, num_blocks), index_q


def right(exchange: GlooExchange, seed: int, lens: list[int], rows: int, **options) -> bool:
    """Whether a launch selects what one rank alone does."""
    arguments, index_q = batch_of(seed, lens, rows)
    own = list(exchange.shard.own_heads)
    out = torch.full((len(own), len(index_q), 16), 77, dtype=torch.int32)
    got = exchange.select(index_q[:, own], *arguments, out=out, **options)
    whole = block_topk(index_score_decode(index_q, *arguments[:-1]), arguments[-1])
    return got is out and torch.equal(got, whole[own])


def selections(rank: int, world: int, scratch: Path) -> list[bool]:
    """Launches of all batches in every form, over one exchange each."""
    answers = []
    for form in (None, *Results):
        exchange = GlooExchange(None, HEADS, results=form)
        answers += [right(exchange, i, *b, layer=i) for i, b in enumerate(BATCHES)]
        exchange.check()
        exchange.close()
        exchange.close()
    return answers


def after_a_good_launch() -> GlooExchange:
    exchange = GlooExchange(None, HEADS, timeout_s=DEADLINE_S)
    assert right(exchange, 0, *BATCHES[0])
    return exchange


def second_launch(exchange: GlooExchange, seed: int = 1, batch: int = 1, layer: int = 0) -> dict:
    """The error of the second launch; the same must come from then on."""
    try:
        right(exchange, seed, *BATCHES[batch], layer=layer)
    except DcpError as error:
        again = []
        for call in (exchange.check, lambda: right(exchange, 0, *BATCHES[0])):
            try:
                call()
            except DcpError as other:
                again.append(other is error)
        return {
            "rank": error.rank, "peer": error.peer, "site": error.site.name,
            "generation": error.generation, "text": str(error), "again": again,
        }  # fmt: skip
    return {}


def dies(method: str):
    """Rank 1 ends itself in the second launch, when it would call `method`."""

    def run(rank: int, world: int, scratch: Path) -> dict:
        exchange = after_a_good_launch()
        if rank == 1:
            setattr(exchange, method, lambda *a: os._exit(GONE))
        return second_launch(exchange)

    return run


def never_comes(rank: int, world: int, scratch: Path) -> dict:
    """Rank 1 lives, and stays away until the others have given up."""
    exchange = after_a_good_launch()
    exchange.timeout = timedelta(seconds=1)
    if rank == 1:
        end = time.monotonic() + DEADLINE_S
        while not (scratch / "0.json").exists() and time.monotonic() < end:
            time.sleep(0.05)
        return {}
    return second_launch(exchange)


def leaves_a_launch_out(rank: int, world: int, scratch: Path) -> dict:
    return second_launch(after_a_good_launch(), layer=5 + rank)


def another_shape(rank: int, world: int, scratch: Path) -> dict:
    return second_launch(after_a_good_launch(), batch=5 if rank == 1 else 1)


def other_lengths(rank: int, world: int, scratch: Path) -> dict:
    """The same shapes and another step's lengths."""
    lens, rows = BATCHES[1]
    BATCHES[1] = ([lens[0] - rank, lens[1]], rows)
    return second_launch(after_a_good_launch())


SCENARIOS = {
    "selections": selections,
    "dies-before": dies("_agree"),
    "dies-before-its-queries": dies("_queries"),
    "dies-before-its-results": dies("_results"),
    "never-comes": never_comes,
    "leaves-a-launch-out": leaves_a_launch_out,
    "another-shape": another_shape,
    "other-lengths": other_lengths,
}


def one_rank(scenario: str, rank: int, world: int, scratch: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=world
    )
    answer = SCENARIOS[scenario](rank, world, scratch)
    whole = scratch / f"{rank}.part"
    whole.write_text(json.dumps(answer))
    whole.rename(scratch / f"{rank}.json")
    os._exit(0)  # a group with a dead member cannot be taken down


def run(scenario: str, world: int) -> list[dict]:
    """Each rank's exit status and answer."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        ranks = [
            fork.Process(target=one_rank, args=(scenario, rank, world, scratch), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + DEADLINE_S
        try:
            for process in ranks:
                process.join(max(0.0, end - time.monotonic()))
        finally:
            for process in ranks:
                process.kill()
                process.join()
        files = [scratch / f"{rank}.json" for rank in range(world)]
        answers = [json.loads(f.read_text()) if f.exists() else None for f in files]
    return [{"status": p.exitcode, "answer": a} for p, a in zip(ranks, answers, strict=True)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    output, *wanted = sys.argv[1:]
    found = {}
    for item in wanted:
        name, _, size = item.partition(":")
        found[item] = run(name, int(size or 2))
    Path(output).write_text(json.dumps(found))

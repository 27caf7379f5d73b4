"""Ranks for tests: threads of this process, or processes with a gloo group; no ports, no sleeps.

    run_threads(lambda group: PeerMemory(group, ...), ranks=2)
    run_processes(function, ranks=2, folder=tmp_path)

A `function(rank, ranks, *args)` for processes is one of a module.

Both give one outcome a rank: what the function returned, or the exception that it raised.
"""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE = 300.0  # seconds, for a loaded machine


@dataclass
class _Board:
    ranks: int
    values: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks)


@dataclass
class ThreadGroup:
    """A rank of a group of threads, see rocm_msa.comm.group.Group."""

    rank: int
    ranks: int
    board: _Board

    def all_gather_object(self, value: Any) -> list[Any]:
        self.board.values[self.rank] = pickle.dumps(value)  # as a process would send it
        self.board.barrier.wait(PATIENCE)
        gathered = [pickle.loads(self.board.values[r]) for r in range(self.ranks)]
        self.board.barrier.wait(PATIENCE)
        return gathered

    def leave(self) -> None:
        """What the end of a process does to the others: who waits for it is told."""
        self.board.barrier.abort()


def thread_groups(ranks: int) -> list[ThreadGroup]:
    board = _Board(ranks)
    return [ThreadGroup(rank, ranks, board) for rank in range(ranks)]


def run_threads(function: Callable[[ThreadGroup], Any], ranks: int) -> list[Any]:
    """`function(group)` in a thread a rank."""

    def outcome(group: ThreadGroup) -> Any:
        try:
            return function(group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(outcome, thread_groups(ranks)))


def _child(function, rank: int, ranks: int, folder: str, args: tuple) -> None:
    from datetime import timedelta

    from torch import distributed

    try:
        store = distributed.FileStore(f"{folder}/store", ranks)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE)
        )
        outcome = function(rank, ranks, *args)
    except Exception as error:
        error.add_note(traceback.format_exc())
        outcome = error
    part = Path(folder) / f"{rank}.part"
    part.write_bytes(pickle.dumps(outcome))
    part.replace(Path(folder) / f"{rank}.outcome")


def run_processes(function: Callable[..., Any], ranks: int, folder: Path, *args: Any) -> list[Any]:
    """`function(rank, ranks, *args)` in a process a rank, inside a gloo group.

    A process that ends without an outcome has its exit code as one, and the others go on. All
    processes are ended when this returns.
    """
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=_child, args=(function, rank, ranks, str(folder), args), daemon=True)
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + PATIENCE
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [_outcome(Path(folder), rank, p.exitcode) for rank, p in enumerate(processes)]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join()


def _outcome(folder: Path, rank: int, code: int | None) -> Any:
    path = folder / f"{rank}.outcome"
    return pickle.loads(path.read_bytes()) if path.exists() else code

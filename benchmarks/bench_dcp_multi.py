"""The indexer exchange between the GPUs of one host: checked, then timed. One process a GPU.

    python benchmarks/bench_dcp_multi.py [--ranks 2,4] [--kinds nvfp4,fp8] [--quick] [--out DIR]
    python benchmarks/bench_dcp_multi.py --device cpu        # the checks alone, over gloo

Checks: on every shape each rank's selection is one rank's, bit for bit, also over 1,000 replays of
a graph of 60 layers with changing lengths; a rank that comes a second late is awaited, one that
never launches is named by all others. Then times, a layer: one GPU alone, the exchange by peer
memory, the same by NCCL all-gathers; the phases of the exchange; the context from which it pays.
Writes DIR/dcp_multi.json. Without GPUs it says so and ends with code 0.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PATIENCE_S = 1800
"""Of a rank for the others on the host: compiling, the slowest check."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="group sizes, by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kinds", default="nvfp4,fp8", help="of index caches, by commas")
    parser.add_argument("--quick", action="store_true", help="few shapes and replays")
    parser.add_argument("--only", default="", help="shapes with this in their name, such as 45x4")
    parser.add_argument("--no-times", action="store_true", help="check alone")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--commit", default=_commit(), help="to name in the report")
    options = parser.parse_args()
    import torch

    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    report = {"facts": _facts(options, cards), "groups": []}
    for ranks in map(int, options.ranks.split(",")):
        if options.device == "cuda" and cards < ranks:
            print(f"bench_dcp_multi: {ranks} ranks need {ranks} GPUs, here are {cards}: not run")
            continue
        report["groups"].append(_group(ranks, options))
    if not report["groups"]:
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "dcp_multi.json"
    path.write_text(json.dumps(report, indent=1))
    failed = [fault for group in report["groups"] for fault in group["faults"]]
    print(f"{path}; {len(failed)} faults")
    return 1 if failed else 0


def _group(ranks: int, options: argparse.Namespace) -> dict:
    """Run one group size; rank 0's report."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            spawn.Process(target=_rank, args=(rank, ranks, vars(options), folder), daemon=True)
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            _join(processes)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                if process.pid is not None:
                    process.join()
        codes = [process.exitcode for process in processes]
        path = Path(folder) / "report.json"
        report = json.loads(path.read_text()) if path.exists() else {"ranks": ranks, "faults": []}
    if any(codes):
        report["faults"].append(f"{ranks} ranks: the processes ended with {codes}")
        print(report["faults"][-1])
    return report


def _join(processes: list) -> None:
    """Until all have ended, or one has failed: the others would wait for it."""
    running = {process.sentinel: process for process in processes}
    while running:
        ended = wait(list(running), PATIENCE_S)
        if not ended or any(running.pop(one).exitcode for one in ended):
            return


def _rank(rank: int, ranks: int, options: dict, folder: str) -> None:
    """One rank's process."""
    import torch
    from torch import distributed

    from benchmarks import dcp_multi

    if options["device"] == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # this host alone
        torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", ranks)
    backend = "gloo" if options["device"] == "cpu" else "nccl"
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if backend == "nccl":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE_S)
    )
    team = dcp_multi.Team(rank, ranks, device)
    team.kinds, team.only = options["kinds"].split(","), options["only"]
    report = dcp_multi.run(team, quick=options["quick"], times=not options["no_times"])
    if rank == 0:
        part = Path(folder) / "report.part"
        part.write_text(json.dumps(report))
        part.replace(Path(folder) / "report.json")
    distributed.destroy_process_group()


def _facts(options: argparse.Namespace, cards: int) -> dict:
    import torch
    import triton

    facts = {
        "commit": options.commit,
        "command": " ".join(["python benchmarks/bench_dcp_multi.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if cards else "cpu",
        "cards": cards,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    print(facts)
    return facts


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())

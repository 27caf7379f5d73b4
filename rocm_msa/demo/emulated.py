"""The demo on emulated gfx950: one prompt, with the reference ops and with the GPU's code objects.

A vLLM server on the CPU is started once a run, asked, and stopped. The runs are the reference, then
backend "emulated"; with several tensor-parallel ranks the latter twice: with the index scan shared
between the ranks (indexer_decode_cp) and not.

With `mono` the decode steps run each sparse layer as one launch of the mono kernel, whose PyTorch
reference is the first run.

The greedy tokens must be equal. The kernels round more than the reference does (docs/emulated.md),
so a run may leave the reference's path where the two best tokens are closer than that; then the
tokens up to there count, and it is said. Shared or not, the scan gives the same bits.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from rocm_msa.cli.console import table
from rocm_msa.config import ModelConfig
from rocm_msa.demo import prepare
from rocm_msa.demo.client import Client, Sample, Token
from rocm_msa.demo.run import progress_line, supervise
from rocm_msa.demo.server import POLL_SECONDS, DemoError, Server, free_port

PROMPT_TOKENS, NEW_TOKENS = 150, 8
MONO_CHECKPOINT = {"layout": "mxfp4", "intermediate_size": 256}
"""The mono kernel reads quantised experts, in tiles that the tiny model's own do not fill."""
ROUNDING = 0.8
"""Of a log-probability, in nats: what the kernels' roundings of K, V, q and p may move it by."""
ANSWER_SECONDS = 1800.0
COUNT_SECONDS, REST_SECONDS = 120.0, 5.0
"""For the workers' counters to reach the server, and without a change: every two seconds they are
published."""


@dataclass(frozen=True)
class EmulatedOptions:
    """ranks: tensor-parallel. mono: with the mono kernel. cache_dir None: the user's cache."""

    ranks: int = 1
    mono: bool = False
    keep_files: bool = False
    cache_dir: Path | None = None
    start_timeout: float = 900.0


@dataclass
class Run:
    """A server to ask. options: of the plugin. tokens, samples: what came."""

    title: str
    options: dict[str, Any]
    tokens: list[Token] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def runs_of(ranks: int, mono: bool = False) -> list[Run]:
    """The reference first."""
    every = {"mono": True} if mono else {}
    emulated = {"backend": "emulated"} | every
    reference = Run("the reference ops (PyTorch)", {"backend": "reference"} | every)
    if ranks == 1:
        return [reference, Run("gfx950 code objects in the emulator", emulated)]
    shared = emulated | {"indexer_decode_cp": True, "indexer_decode_cp_min_blocks": 1}
    return [
        reference,
        Run(f"gfx950 code objects, the scan shared by {ranks} ranks", shared),
        Run("gfx950 code objects, each rank scans alone", emulated),
    ]


def run_emulated_demo(options: EmulatedOptions, console: Console) -> int:
    """Run the demo; returns the exit code, 128 + signal when one ended it.

    Raises:
        DemoError: a step failed, or tokens differ. Everything that was started has been stopped.
    """
    began = time.monotonic()
    prepare.check_environment(os.environ)
    cache_dir = options.cache_dir or prepare.default_cache_dir(os.environ)
    kind = MONO_CHECKPOINT if options.mono else {}
    directory, _ = prepare.checkpoint(cache_dir, **kind)
    model = ModelConfig.from_json(directory)
    runs = runs_of(options.ranks, options.mono)
    files = Path(tempfile.mkdtemp(prefix="rocm-msa-demo-"))
    keep = True
    try:
        for number, run in enumerate(runs, 1):
            console.print(f"\n{number}. {run.title}", style="bold", markup=False)
            code = _ask(run, number, directory, model, options, files, console)
            if code:
                return code
        compare(runs, console)
        show_work(runs, console)
        keep = options.keep_files
    finally:
        if not keep:
            shutil.rmtree(files, ignore_errors=True)
    if options.keep_files:
        console.print(f"Server logs kept: {files}", markup=False, soft_wrap=True)
    console.print(f"Done in {time.monotonic() - began:.0f} s.")
    return 0


def _ask(
    run: Run,
    number: int,
    directory: Path,
    model: ModelConfig,
    options: EmulatedOptions,
    files: Path,
    console: Console,
) -> int:
    """Start a server, fill in the run's tokens and counts, stop the server."""
    port = free_port()
    extra = [
        f"--tensor-parallel-size={options.ranks}",
        "--dtype=bfloat16",
        f"--additional-config={json.dumps({'rocm_msa': run.options})}",
    ]
    environment = prepare.server_environment(os.environ)
    if options.ranks > 1:
        cores = os.cpu_count() or 1
        binding = "|".join(str(rank % cores) for rank in range(options.ranks))
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": binding,
        }
    server = Server(
        prepare.server_command(directory, port, extra), port, files / f"{number}.log", environment
    )

    def course() -> None:
        with progress_line(console) as progress:
            seconds = server.wait_healthy(options.start_timeout, progress)
        console.print(f"Healthy after {seconds:.0f} s; {PROMPT_TOKENS} prompt tokens ...")
        client = Client(server.url, prepare.SERVED_NAME, ANSWER_SECONDS)
        start = time.monotonic()
        run.tokens = _watched(
            lambda: client.greedy(prompt(options.mono), NEW_TOKENS), server, console
        )
        console.print(
            f"{len(run.ids)} tokens in {time.monotonic() - start:.1f} s: {run.ids}", markup=False
        )
        calls = model.num_dense_layers * NEW_TOKENS * options.ranks
        run.samples = _settled(client, calls)

    return supervise(server, course, console)


def prompt(mono: bool) -> list[int]:
    """Token ids that look random; the same each time.

    The tiny models' weights are random, so most prompts meet two tokens that are nearly as good
    within a few steps. Behind these the best is ahead by 0.38 nats at least.
    """
    state, ids = 11 if mono else 4, []
    for _ in range(PROMPT_TOKENS):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        ids.append(3 + (state >> 8) % 897)
    return ids


def _watched(call: Callable[[], Any], server: Server, console: Console) -> Any:
    """`call` in a thread, the server's last log line meanwhile: the emulator says where it is."""
    start = time.monotonic()
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        future = pool.submit(call)
        with progress_line(console) as progress:
            while not concurrent.futures.wait([future], timeout=POLL_SECONDS).done:
                server.check_alive()
                progress(time.monotonic() - start, server.last_line())
        return future.result()
    finally:
        pool.shutdown(wait=False)  # the server's end ends the request


def _settled(client: Client, calls: int) -> list[Sample]:
    """The server's `rocm_msa_` counters: they hold `calls` of dense_attention, and rest."""
    end = time.monotonic() + COUNT_SECONDS
    before: list[Sample] = []
    while True:
        samples = client.samples("rocm_msa_")
        counted = sum(
            s.value for s in samples if s.name == OP_CALLS and s.labels["op"] == "dense_attention"
        )
        if counted == calls and samples == before:
            return samples
        if time.monotonic() > end:
            raise DemoError(
                f"/metrics: expected {calls} calls of dense_attention, got {counted:.0f}"
            )
        before = samples
        time.sleep(REST_SECONDS)


OP_CALLS = "rocm_msa_op_calls_total"
DECODE_CP = "rocm_msa_decode_cp_calls_total"
MONO_STEPS = "rocm_msa_mono_steps_total"
WORK = {
    "launches": "rocm_msa_emulated_launches_total",
    "wave-instructions": "rocm_msa_emulated_instructions_total",
    "bytes": "rocm_msa_emulated_bytes_total",
}


def compare(runs: list[Run], console: Console) -> None:
    """Raises DemoError for tokens that differ where roundings do not explain it."""
    reference, *others = runs
    console.print("\nTokens", style="bold")
    for run in others:
        console.print(_verdict(reference, run), markup=False)
    for run in others[1:]:
        if run.tokens != others[0].tokens:
            raise DemoError(f"{run.title}: {run.tokens}\n{others[0].title}: {others[0].tokens}")
        console.print(f"{run.title}: the same tokens and log-probabilities, bit for bit.")


def _verdict(reference: Run, run: Run) -> str:
    pairs = list(zip(reference.tokens, run.tokens, strict=True))
    same = next((n for n, (a, b) in enumerate(pairs) if a.id != b.id), len(pairs))
    moved = max((abs(a.logprob - b.logprob) for a, b in pairs[:same]), default=0.0)
    text = f"{run.title}: "
    if same == len(pairs):
        text += f"all {same} tokens are the reference's"
    else:
        margin = reference.tokens[same].margin
        if margin > ROUNDING:
            raise DemoError(
                f"{run.title}: token {same} is {run.ids[same]}, the reference's is "
                f"{reference.ids[same]}, by a margin of {margin:.2f} nats"
            )
        text += (
            f"{same} of {len(pairs)} tokens are the reference's; then its two best are only "
            f"{margin:.2f} nats apart, and the roundings choose the other"
        )
    if moved > ROUNDING:
        raise DemoError(f"{run.title}: a log-probability moved by {moved:.2f} nats")
    return f"{text}; their log-probabilities differ by up to {moved:.2f}."


def show_work(runs: list[Run], console: Console) -> None:
    """What ran: calls of ops by backend, then launches and their work by kernel.

    Raises:
        DemoError: an op with a kernel did not run it, or the ranks did not share what they should.
    """
    console.print("\nCalls of ops, over all layers, steps and ranks", style="bold")
    rows = table("op", *(f"run {n}" for n in range(1, len(runs) + 1)), left=len(runs) + 1)
    calls = [_by(run, OP_CALLS, "op", "backend") for run in runs]
    for op in sorted({op for run in calls for op, _ in run}):
        cells = [
            ", ".join(f"{int(n)} {backend}" for (name, backend), n in run.items() if name == op)
            for run in calls
        ]
        rows.add_row(op, *cells)
    console.print(rows)
    for run, counted in zip(runs[1:], calls[1:], strict=True):
        fell_back = {op for op, backend in counted if backend != "emulated"} - {"dense_attention"}
        if fell_back:
            raise DemoError(f"{run.title}: {', '.join(sorted(fell_back))} did not run in it")
        _check_paths(run)
    run = runs[1]
    console.print(f"\nKernels of run 2: {run.title}", style="bold", markup=False)
    rows = table("gfx950 kernel", "launches", "wave-instructions", "bytes read", "written", left=1)
    work = {
        key: _by(run, name, "kernel", *(["way"] if key == "bytes" else []))
        for key, name in WORK.items()
    }
    for (kernel,), launches in sorted(work["launches"].items()):
        rows.add_row(
            kernel,
            f"{launches:,.0f}",
            f"{work['wave-instructions'][kernel,]:,.0f}",
            *(f"{work['bytes'].get((kernel, way), 0):,.0f}" for way in ("read", "written")),
        )
    rows.add_row(
        "all",
        *(f"{sum(work[key].values()):,.0f}" for key in ("launches", "wave-instructions")),
        *(
            f"{sum(n for (_, w), n in work['bytes'].items() if w == way):,.0f}"
            for way in ("read", "written")
        ),
    )
    console.print(rows)
    console.print("Counted by the emulator: function, not time. No GPU was involved.")


def _check_paths(run: Run) -> None:
    """Raises DemoError for decode steps that did not go the way that was asked for."""
    if run.options.get("mono"):
        ways = {way: int(n) for way, n in _by(run, MONO_STEPS, "path", "reason").items()}
        steps = sum(n for (path, _), n in ways.items() if path == "mono")
        if not steps or steps % (NEW_TOKENS - 1):
            raise DemoError(f"{run.title}: expected all decode steps on the mono path, got {ways}")
    elif run.options.get("indexer_decode_cp"):
        ways = {way: int(n) for (way,), n in _by(run, DECODE_CP, "path").items()}
        if set(ways) != {"shared"}:
            raise DemoError(f"{run.title}: expected shared decode batches, got {ways}")


def _by(run: Run, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """A counter summed by some of its labels."""
    found: dict[tuple[str, ...], float] = {}
    for sample in run.samples:
        if sample.name == name:
            key = tuple(sample.labels[label] for label in labels)
            found[key] = found.get(key, 0.0) + sample.value
    return found

"""Two vLLM engines on this machine, prefill and decode, behind the proxy: `make demo-pd`.

The tiny checkpoint, NVFP4 caches, OpenAI requests. First our connector, then vLLM's own; for
each request the NIXL descriptors and bytes that the decode engine read, from its own metrics, and
whether the text is that of one engine alone.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rocm_msa.demo import prepare
from rocm_msa.demo.client import Client
from rocm_msa.demo.pair import (
    ROWS,
    STOCK,
    Transfers,
    decode_engine,
    engine_server,
    prefill_engine,
    proxy_server,
    running,
    settled,
    transfers,
)
from rocm_msa.demo.server import DemoError

PROXY = Path(__file__).with_name("proxy.py")
LENGTHS = (300, 1000, 3000)
TOKENS = 16
NAMES = {ROWS: "ours", STOCK: "vLLM's"}
FLAGS = ("--dtype=float32",)  # so that two engines give the tokens of one


@dataclass(frozen=True)
class Row:
    """One request: what was read for it, and how it was answered."""

    connector: str
    prompt: int
    read: Transfers
    seconds: float
    same: bool


def prompts() -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(5, 1000) for _ in range(n)] for n in LENGTHS]


def measure(connector: str, checkpoint: Path, logs: Path, console: Console) -> list[Row]:
    """Run all requests through one pair."""
    logs.mkdir()
    engines = [
        engine_server(checkpoint, engine, connector, logs / f"{engine.role}.log")
        for engine in (prefill_engine(flags=FLAGS), decode_engine(flags=FLAGS))
    ]
    prefill, decode = engines
    proxy = proxy_server(PROXY, prefill, decode, logs / "proxy.log")
    console.print(f"{connector}: starting prefill, decode and proxy ...", highlight=False)
    begun = time.monotonic()
    rows = []
    with running([prefill, decode, proxy]):
        console.print(f"  healthy after {time.monotonic() - begun:.0f} s", highlight=False)
        front = Client(proxy.url, prepare.SERVED_NAME)
        alone = Client(prefill.url, prepare.SERVED_NAME)
        front.complete([7, 8, 9], 2)  # the handshake
        settled(decode, connector, 1)
        for prompt in prompts():
            before = transfers(decode, connector)
            answer = front.complete(prompt, TOKENS)
            read = settled(decode, connector, before.reads + 1).since(before)
            same = answer.text == alone.complete(prompt, TOKENS).text
            rows.append(Row(connector, len(prompt), read, answer.total_s, same))
    return rows


def report(rows: list[Row], console: Console) -> None:
    table = Table(
        "connector", "prompt", "blocks", "descriptors", "a block", "bytes", "as one engine"
    )
    for row in rows:
        blocks = -(-row.prompt // 128)
        table.add_row(
            NAMES[row.connector],
            f"{row.prompt:,}",
            str(blocks),
            str(row.read.descriptors),
            f"{row.read.descriptors / blocks:.2f}",
            f"{row.read.nbytes:,}",
            "the same" if row.same else "OTHER",
        )
    console.print(table)
    console.print("text: compared with that of one engine alone.", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache-dir", type=Path, help="where the tiny checkpoint is kept")
    parser.add_argument("--only", choices=(STOCK, ROWS), help="one connector")
    parser.add_argument("--keep-files", action="store_true", help="keep the servers' logs")
    args = parser.parse_args()
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    files = Path(tempfile.mkdtemp(prefix="rocm-msa-pd-"))
    keep = True
    try:
        prepare.check_environment(os.environ)
        cache_dir = args.cache_dir or prepare.default_cache_dir(os.environ)
        checkpoint, _ = prepare.checkpoint(cache_dir)
        rows = []
        for connector in [args.only] if args.only else [ROWS, STOCK]:
            rows += measure(connector, checkpoint, files / connector, console)
        report(rows, console)
        keep = args.keep_files
    except DemoError as error:
        console.print(f"error: {error}", markup=False, style="red")
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if keep:
            console.print(f"logs: {files}", markup=False, highlight=False)
        else:
            shutil.rmtree(files, ignore_errors=True)
    if not all(row.same for row in rows):
        console.print("error: a text differs from a single engine's", style="red")
        return 1
    console.print("All processes ended.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

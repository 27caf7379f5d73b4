"""manifest.json: what a folder of compiled kernels holds. Written by aot.py, read by launcher.py.

One file a folder, one entry a kernel, one code object (an ELF file) an entry. Everything that a
launch must know is here, so that serving needs no compiler. Reading is strict: another version, an
unknown or missing key and a name that comes twice are a ManifestError that names them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rocm_msa.errors import expect

FORMAT, VERSION = "rocm-msa code objects", 1
FILE_NAME = "manifest.json"
_PLAIN_FILE = re.compile(r"[A-Za-z0-9_]+\.hsaco")


class ManifestError(RuntimeError):
    """Compiled kernels that cannot be used; the message says which, why and what to do."""


@dataclass(frozen=True)
class Argument:
    """One kernel argument. offset, size: bytes in the argument block. kind: the code object's
    (global_buffer, by_value, hidden_...); type: the compiler's (ptr, i32, i64, f32, ...)."""

    name: str
    offset: int
    size: int
    kind: str
    type: str


@dataclass(frozen=True)
class Entry:
    """One kernel.

    Attributes:
        name: the build's symbol, unique in the folder.
        module: the Python module that launches it and compiled it.
        build: the build parameters.
        symbol: the kernel's name in the code object.
        file, bytes, sha256: the code object.
        source_digest: of the Python sources, the build parameters and the compiler's version.
        block: lanes of a workgroup.
        grid: what the workgroups of a launch are, in words.
        static_lds, dynamic_lds: bytes of a workgroup; the launch asks for the dynamic ones.
        kernarg_bytes: of the argument block.
        registers: vgpr, agpr, sgpr, vgpr_spills, sgpr_spills, scratch_bytes.
    """

    name: str
    module: str
    build: dict[str, Any]
    symbol: str
    file: str
    bytes: int
    sha256: str
    source_digest: str
    block: tuple[int, int, int]
    grid: str
    static_lds: int
    dynamic_lds: int
    kernarg_bytes: int
    arguments: tuple[Argument, ...]
    registers: dict[str, int]


@dataclass(frozen=True)
class Manifest:
    """The kernels of a folder, by name, all for one arch and from one compiler."""

    arch: str
    flydsl: str
    package: str
    kernels: dict[str, Entry]


def write(directory: Path, manifest: Manifest) -> Path:
    """Write `directory`/manifest.json, in one step."""
    payload = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    payload["kernels"] = [asdict(manifest.kernels[name]) for name in sorted(manifest.kernels)]
    path = directory / FILE_NAME
    part = path.with_suffix(".part")
    part.write_text(json.dumps(payload, indent=1) + "\n")
    part.replace(path)
    return path


def read(directory: Path) -> Manifest:
    """Read and check `directory`/manifest.json.

    Raises:
        ManifestError: no such file, not JSON, another version, keys, a name that comes twice.
    """
    path = Path(directory) / FILE_NAME
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ManifestError(f"no compiled kernels: {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ManifestError(f"{path}: not a manifest of rocm-msa's compiled kernels")
    if data.get("version") != VERSION:
        raise ManifestError(f"{path}: " + expect("version", VERSION, data.get("version")))
    wanted = {"format", "version", *(f.name for f in fields(Manifest))}
    _check_keys(str(path), data, wanted)
    kernels: dict[str, Entry] = {}
    for item in data["kernels"]:
        entry = entry_from_json(str(path), item)
        if entry.name in kernels:
            raise ManifestError(f"{path}: two kernels are called {entry.name}")
        kernels[entry.name] = entry
    return Manifest(data["arch"], data["flydsl"], data["package"], kernels)


def entry_from_json(where: str, item: Any) -> Entry:
    """An entry as `asdict` and JSON left it; ManifestError for other keys or types."""
    name = item.get("name") if isinstance(item, dict) else None
    where = f"{where}: kernel {name}"
    _check_keys(where, item, {f.name for f in fields(Entry)})
    for argument in item["arguments"]:
        _check_keys(f"{where}, arguments", argument, {f.name for f in fields(Argument)})
    if not _PLAIN_FILE.fullmatch(str(item["file"])):
        raise ManifestError(f"{where}: " + expect("file", "NAME.hsaco beside it", item["file"]))
    for key in ("bytes", "static_lds", "dynamic_lds", "kernarg_bytes"):
        if not isinstance(item[key], int) or item[key] < 0:
            raise ManifestError(f"{where}: " + expect(key, "an int >= 0", item[key]))
    block = tuple(item["block"])
    if len(block) != 3 or not all(isinstance(n, int) and n > 0 for n in block):
        raise ManifestError(f"{where}: " + expect("block", "three positive ints", item["block"]))
    arguments = tuple(Argument(**argument) for argument in item["arguments"])
    return Entry(**{**item, "block": block, "arguments": arguments})


def read_code_object(directory: Path, entry: Entry) -> bytes:
    """The bytes of an entry's code object; ManifestError when missing or changed."""
    path = Path(directory) / entry.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"kernel {entry.name}: {path}: {error.strerror or error}") from None
    if len(data) != entry.bytes:
        got = expect("bytes", entry.bytes, len(data))
        raise ManifestError(f"kernel {entry.name}: {path}: {got} (cut short or replaced)")
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.sha256:
        got = expect("SHA-256", entry.sha256, digest)
        raise ManifestError(f"kernel {entry.name}: {path}: {got}")
    return data


def _check_keys(where: str, data: Any, wanted: set[str]) -> None:
    if not isinstance(data, Mapping):
        raise ManifestError(f"{where}: expected an object, got {type(data).__name__}")
    unknown, missing = sorted(set(data) - wanted), sorted(wanted - set(data))
    if unknown or missing:
        raise ManifestError(f"{where}: unknown keys {unknown}, missing keys {missing}")

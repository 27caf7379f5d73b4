"""Read a checkpoint safely, and undo its quantisation.

`open_checkpoint` checks every file against its own header, and the index against the files,
before the first tensor is read: a truncated or missing file is an error that names it.
`dequantised_weights` turns the stream of a quantised checkpoint into the plain one.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rocm_msa.checkpoint.names import TensorSpec, check_tensors, expected_tensors
from rocm_msa.checkpoint.quantisation import is_outside, quantisation_of
from rocm_msa.formats import mxfp, nvfp4

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_MAX_HEADER = 100_000_000

# The stored parts of a linear, by algorithm; MXFP8 scales have two spellings.
_PARTS = {
    "mxfp8": ("weight", "weight_scale"),
    "mxfp4": ("weight", "weight_scale"),
    "nvfp4": ("weight", "weight_scale", "weight_scale_2"),
}
_SUFFIXES = {
    "weight": "weight",
    "weight_scale": "weight_scale",
    "weight_scale_inv": "weight_scale",
    "weight_scale_2": "weight_scale_2",
    "input_scale": "input_scale",
}


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint directory. Iterating gives (name, tensor), file by file.

    Attributes:
        config: config.json.
        files: tensor name -> file name.
        specs: tensor name -> shape and dtype, from the headers.
    """

    directory: Path
    config: Mapping[str, Any]
    files: Mapping[str, str]
    specs: Mapping[str, TensorSpec]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        names: dict[str, list[str]] = {}
        for name, file in self.files.items():
            names.setdefault(file, []).append(name)
        for file, members in names.items():
            with safe_open(self.directory / file, framework="pt", device="cpu") as shard:
                for name in members:
                    yield name, shard.get_tensor(name)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self.files:
            raise KeyError(f"{name}: no such tensor in {self.directory}")
        path = self.directory / self.files[name]
        with safe_open(path, framework="pt", device="cpu") as shard:
            return shard.get_tensor(name)

    def check(self) -> None:
        """Compare the tensors with the table of this config (see `check_tensors`)."""
        check_tensors(expected_tensors(self.config, self.specs), self.specs)

    def dequantised(
        self, dtype: torch.dtype = torch.bfloat16
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors under their plain names, without quantisation."""
        return dequantised_weights(self, self.config, dtype)


def open_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint and verify its files; the tensors themselves are read later.

    Raises:
        FileNotFoundError: no directory, no config.json, no safetensors, or a missing shard.
        ValueError: a truncated or malformed file, a tensor in two files, an index that names a
            tensor which is not in its shard, or a shard with tensors the index does not name.
    """
    root = Path(directory)
    if not root.is_dir():
        raise FileNotFoundError(f"checkpoint: no directory {root}")
    config = _read_json(root / "config.json")
    index_path = root / "model.safetensors.index.json"
    weight_map: dict[str, str] | None = None
    if index_path.exists():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index_path}: expected a non-empty weight_map")
        shards = sorted(set(weight_map.values()))
        absent = [s for s in shards if not (root / s).is_file()]
        if absent:
            raise FileNotFoundError(
                f"checkpoint {root}: the index names files that are not there: {', '.join(absent)}"
            )
    else:
        shards = sorted(p.name for p in root.glob("*.safetensors"))
        if not shards:
            raise FileNotFoundError(f"checkpoint: no *.safetensors in {root}")

    files: dict[str, str] = {}
    specs: dict[str, TensorSpec] = {}
    for shard in shards:
        for name, spec in read_header(root / shard).items():
            if name in files:
                raise ValueError(f"checkpoint {root}: {name} is in {files[name]} and in {shard}")
            files[name], specs[name] = shard, spec
    if weight_map is not None:
        _check_index(root, weight_map, files)
    return Checkpoint(root, config, files, specs)


def read_header(path: Path) -> dict[str, TensorSpec]:
    """The tensors that a safetensors file holds, its size checked against its header.

    Raises:
        ValueError: the file is shorter or longer than its header says, or is not safetensors.
    """
    actual = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if len(first) < 8 or length > _MAX_HEADER:
            raise ValueError(f"{path}: not a safetensors file ({actual} bytes)")
        if actual < 8 + length:
            raise ValueError(
                f"{path}: truncated: expected at least {8 + length} bytes (header), got {actual}"
            )
        try:
            header = json.loads(file.read(length))
            entries = {k: v for k, v in header.items() if k != "__metadata__"}
            end = max((v["data_offsets"][1] for v in entries.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: malformed safetensors header: {error}") from error
    expected = 8 + length + end
    if actual != expected:
        fault = "truncated" if actual < expected else "too long"
        raise ValueError(f"{path}: {fault}: expected {expected} bytes, got {actual}")
    return {name: _spec(path, name, entry, end) for name, entry in entries.items()}


def _spec(path: Path, name: str, entry: Mapping[str, Any], end: int) -> TensorSpec:
    dtype = _DTYPES.get(entry.get("dtype"))
    if dtype is None:
        raise ValueError(f"{path}: {name}: unknown dtype {entry.get('dtype')!r}")
    shape = tuple(entry["shape"])
    begin, stop = entry["data_offsets"]
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    if not 0 <= begin <= stop <= end or stop - begin != size:
        raise ValueError(
            f"{path}: {name}: expected {size} bytes for {list(shape)} {entry['dtype']}, "
            f"got offsets {begin} to {stop}"
        )
    return TensorSpec(shape, dtype)


def _check_index(root: Path, weight_map: Mapping[str, str], files: Mapping[str, str]) -> None:
    wrong = [
        f"{name}: the index says {shard}, found {files.get(name, 'nowhere')}"
        for name, shard in weight_map.items()
        if files.get(name) != shard
    ]
    wrong += [
        f"{name}: in {file}, not in the index"
        for name, file in files.items()
        if name not in weight_map
    ]
    if wrong:
        more = f"\n  ... and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise ValueError(
            f"checkpoint {root}: the index and the files disagree ({len(wrong)}):\n  "
            + "\n  ".join(wrong[:10])
            + more
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint: no file {path}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def dequantised_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Give the weights of a quantised checkpoint as `dtype`, under the plain names.

    Streams: a linear is given as soon as all of its parts have come, whatever their order and
    files; only unfinished linears are held. Unquantised tensors, vision and MTP ones included,
    pass through untouched. `input_scale` is dropped: activations are not quantised here.

    Args:
        weights: (name, tensor); names with or without the `language_model.` prefix.
        config: the HF config as a dict, or its `quantization_config` alone.
        dtype: of the dequantised weights.

    Raises:
        ValueError: parts that never came, or a part with another dtype than its layout has.
    """
    algorithm = quantisation_of(config).algorithm
    pending: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights:
        module, _, suffix = name.rpartition(".")
        part = _SUFFIXES.get(suffix)
        kind = "bf16" if part is None or is_outside(name) else algorithm(module)
        if kind == "bf16" or (part == "weight" and tensor.ndim < 2):
            yield name, tensor
            continue
        if part not in _PARTS[kind]:
            continue
        parts = pending.setdefault(module, {})
        if part in parts:
            raise ValueError(f"{name}: came twice")
        parts[part] = tensor
        if len(parts) == len(_PARTS[kind]):
            del pending[module]
            yield f"{module}.weight", _dequantise(module, kind, parts, dtype)
    if pending:
        lines = [
            f"{module}: {', '.join(p for p in _PARTS[algorithm(module)] if p not in parts)}"
            for module, parts in pending.items()
        ]
        more = f"\n  ... and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise ValueError(
            f"quantised linears with missing parts ({len(lines)}):\n  "
            + "\n  ".join(lines[:10])
            + more
        )


def _dequantise(
    module: str, kind: str, parts: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    weight, scale = parts["weight"], parts["weight_scale"]
    wanted = torch.float8_e4m3fn if kind == "mxfp8" else torch.uint8
    if weight.dtype != wanted:
        raise ValueError(f"{module}.weight: expected {wanted} for {kind}, got {weight.dtype}")
    if kind == "nvfp4":
        scale_2 = parts["weight_scale_2"].float().reshape(())
        return nvfp4.dequantize(weight, scale, scale_2, dtype=dtype)
    scale = scale.view(torch.uint8)
    if kind == "mxfp8":
        return mxfp.mxfp8_dequantize(weight, scale, dtype=dtype)
    return mxfp.mxfp4_dequantize(weight, scale, dtype=dtype)

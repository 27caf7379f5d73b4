"""A rank's weights of one layer from a checkpoint's tensors; every fault by the tensor's name.

Names and formats: rocm_msa/checkpoint. Query, KV and index heads, experts' widths and the inputs of
the output projection are cut by rank; the index key, norms and the router are on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from mono_kernel.shapes import HEAD_DIM, Formats, Shape, kv_head_of
from mono_kernel.weights import GROUP, HEAD_NORMS, PER_BYTE, LayerWeights, Stored, stack
from rocm_msa.errors import Refusals, expect

_SCALE_NAN = 255
_E4M3_NAN = 0x7F  # and with the sign bit
_E4M3 = torch.float8_e4m3fn
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)


class _Reader:
    """Tensors of one layer by name; collects every fault."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix
        self.refusals = Refusals(f"weights of {prefix} for the mono kernel")

    def find(self, name: str) -> torch.Tensor | None:
        return self.tensors.get(f"{self.prefix}.{name}")

    def fault(self, name: str, wanted: object, got: object) -> None:
        self.refusals.check(False, expect(f"{self.prefix}.{name}", wanted, got))

    def vector(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found = self.find(name)
        if found is None or tuple(found.shape) != size or not found.dtype.is_floating_point:
            got = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            self.fault(name, f"a floating-point tensor {list(size)}", got)
            return torch.zeros(size, dtype=dtype)
        if not bool(found.float().isfinite().all()):
            self.fault(name, "finite values", "others")
        return found.to(dtype)

    def linear(self, name: str, outputs: int, inputs: int, kind: str) -> Stored:
        """A linear in the format `kind`; zeros after a fault."""
        weight, scales = self.find(f"{name}.weight"), self._scales(name)
        found = format_of(weight, scales)
        if found != kind:
            self.fault(f"{name}.weight", f"{kind} [{outputs}, {inputs}]", found)
            return self._zeros(outputs, inputs, kind)
        shape = [outputs, inputs // PER_BYTE.get(kind, 1)]
        wanted = [(f"{name}.weight", weight, shape)]
        if scales is not None:
            wanted.append((f"{name} scales", scales, [outputs, inputs // GROUP[kind]]))
        wrong = [w for w in wanted if list(w[1].shape) != w[2]]
        for what, tensor, size in wrong:
            self.fault(what, size, list(tensor.shape))
        if wrong:
            return self._zeros(outputs, inputs, kind)
        factor = 1.0
        if kind == "nvfp4":
            whole = self.find(f"{name}.weight_scale_2")
            factor = float("nan") if whole is None or whole.numel() != 1 else float(whole)
            if not 0.0 < factor < float("inf"):
                self.fault(f"{name}.weight_scale_2", "one number > 0", whole)
        raw = None if scales is None else scales.view(torch.uint8)
        return Stored(kind, weight, raw, factor)

    def _scales(self, name: str) -> torch.Tensor | None:
        for suffix in ("weight_scale_inv", "weight_scale"):
            found = self.find(f"{name}.{suffix}")
            if found is not None:
                return found
        return None

    def finite(self, name: str, part: Stored) -> Stored:
        """The part of linear `name` that this rank holds, looked through for NaN and inf."""
        kind, scales = part.format, part.scales
        if kind == "bf16" and not bool(part.data.isfinite().all()):
            self.fault(f"{name}.weight", "finite values", "NaN or inf")
        if kind == "mxfp8" and _has_nan(part.data.view(torch.uint8)):
            self.fault(f"{name}.weight", "finite values", "NaN")
        if kind in ("mxfp8", "mxfp4") and bool((scales == _SCALE_NAN).any()):
            self.fault(f"{name} scales", "E8M0 codes below 255", "255, a NaN block")
        if kind == "nvfp4" and _has_nan(scales):
            self.fault(f"{name} scales", "E4M3 numbers", "NaN")
        return part

    def _zeros(self, outputs: int, inputs: int, kind: str) -> Stored:
        dtype = {"bf16": torch.bfloat16, "mxfp8": _E4M3}.get(kind, torch.uint8)
        data = torch.zeros(outputs, inputs // PER_BYTE.get(kind, 1), dtype=torch.uint8)
        data = data.to(dtype)
        scales = torch.zeros(outputs, inputs // GROUP[kind], dtype=torch.uint8)
        return Stored(kind, data, None if kind == "bf16" else scales)


def _has_nan(codes: torch.Tensor) -> bool:
    """Of E4M3 bytes. The largest magnitude of all: a layer has billions of them."""
    return int((codes & _E4M3_NAN).max()) == _E4M3_NAN


def format_of(weight: torch.Tensor | None, scales: torch.Tensor | None) -> str:
    """bf16, mxfp8, mxfp4, nvfp4, or what was found instead."""
    if weight is None:
        return "nothing"
    if weight.dtype is torch.bfloat16 and scales is None:
        return "bf16"
    kind = None if scales is None else scales.dtype
    if weight.dtype is _E4M3 and kind in _E8M0:
        return "mxfp8"
    if weight.dtype is torch.uint8 and kind in (*_E8M0, _E4M3):
        return "nvfp4" if kind is _E4M3 else "mxfp4"
    return f"{weight.dtype} with scales {kind}"


def formats_of(tensors: Mapping[str, torch.Tensor], prefix: str) -> Formats:
    """How a layer's weights are stored, by its first tensors."""
    reader = _Reader(tensors, prefix)

    def kind(name: str, default: str) -> str:
        weight = reader.find(f"{name}.weight")
        return default if weight is None else format_of(weight, reader._scales(name))

    routed = kind("block_sparse_moe.experts.0.w1", "nothing")
    return Formats(
        kind("self_attn.q_proj", "nothing"),
        routed,
        kind("block_sparse_moe.shared_experts.gate_proj", routed),
    )


def read_layer(
    shape: Shape, rank: int, tensors: Mapping[str, torch.Tensor], prefix: str
) -> LayerWeights:
    """A rank's share of one layer.

    Args:
        tensors: whole tensors of the checkpoint by name, see checkpoint/names.py; lazy mappings
            are asked for a name once or twice.
        prefix: of the layer, "model.layers.3".

    Raises:
        ConfigError: a missing or unfit tensor, by name; all of them at once.
    """
    s, read = shape, _Reader(tensors, prefix)
    kv_total = s.whole_kv_heads
    kv = kv_head_of(rank, s.tp, kv_total)
    columns = s.hidden

    def by_heads(name: str, total: int, first: int, count: int) -> Stored:
        whole = read.linear(f"self_attn.{name}", total * HEAD_DIM, columns, s.attention_format)
        return read.finite(f"self_attn.{name}", whole.rows(first * HEAD_DIM, count * HEAD_DIM))

    q = by_heads("q_proj", s.q_heads * s.tp, rank * s.q_heads, s.q_heads)
    k, v = (by_heads(name, kv_total, kv.start, s.kv_heads) for name in ("k_proj", "v_proj"))
    index_q = by_heads("index_q_proj", kv_total, kv.start, s.index_heads)
    index_k = by_heads("index_k_proj", 1, 0, 1)
    attended = s.attended * s.tp
    output = read.linear("self_attn.o_proj", s.hidden, attended, s.attention_format)
    output = read.finite("self_attn.o_proj", output.columns(rank * s.attended, s.attended))

    def expert(base: str, names: Sequence[str], width: int, kind: str) -> tuple:
        gate, up = (read.linear(f"{base}.{n}", width * s.tp, s.hidden, kind) for n in names[:2])
        down = read.linear(f"{base}.{names[2]}", s.hidden, width * s.tp, kind)
        cut = rank * width
        parts = gate.rows(cut, width), up.rows(cut, width), down.columns(cut, width)
        return tuple(read.finite(f"{base}.{n}", p) for n, p in zip(names, parts, strict=True))

    moe = "block_sparse_moe"
    routed = [
        expert(f"{moe}.experts.{e}", ("w1", "w3", "w2"), s.intermediate, s.routed_format)
        for e in range(s.experts)
    ]
    shared = None
    if s.shared:
        names = ("gate_proj", "up_proj", "down_proj")
        shared = expert(f"{moe}.shared_experts", names, s.shared, s.shared_format)
    vectors = _vectors(s, read.vector)
    read.refusals.raise_if_any()
    return LayerWeights(s, vectors, stack([q, k, v, index_q, index_k]), output, routed, shared)


def _vectors(s: Shape, vector: Callable) -> dict[str, torch.Tensor]:
    bf16, fp32, moe = torch.bfloat16, torch.float32, "block_sparse_moe"
    found = {
        "input_norm": vector("input_layernorm.weight", (s.hidden,), bf16),
        "post_norm": vector("post_attention_layernorm.weight", (s.hidden,), bf16),
    }
    for name in HEAD_NORMS:
        found[name] = vector(f"self_attn.{name}.weight", (HEAD_DIM,), bf16)
    found["router"] = vector(f"{moe}.gate.weight", (s.experts, s.hidden), fp32)
    found["bias"] = vector(f"{moe}.e_score_correction_bias", (s.experts,), fp32)
    return found

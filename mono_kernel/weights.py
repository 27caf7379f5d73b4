"""A layer's weights as the kernel streams them; reading.py gives them.

Nothing is converted: values and scales stay as the checkpoint stores them, in another order, so
that a wave reads a tile of 16 outputs x 128 inputs as whole 1 KB runs, each lane its own operand:

    data    [tiles, chunks, pieces, 64 lanes, 16 bytes]      lane = 16 g + output of the tile
            mxfp8   2 pieces: k = 64 p + 16 g ..             mxfp4   1 piece: k = 32 g ..
            bf16    4 pieces: k = 32 p + 8 g ..
            nvfp4   1 piece: k = 16 g .., then 64 + 16 g ..
    scales  [tiles, chunks, 64 lanes, bytes]
            mxfp8, mxfp4   1: of k = 32 g ..
            nvfp4          2: of k = 16 g .., 64 + 16 g ..

An NVFP4 word holds values 0..3 of eight in its low nibbles and 4..7 in the high ones: the table
(device/nvfp4.py) then gives them in order. Per-tensor scales of NVFP4 lie beside, fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mono_kernel.shapes import CHUNK, HEAD_DIM, TILE, Shape
from rocm_msa.checkpoint.quantisation import MX_GROUP, NVFP4_GROUP
from rocm_msa.errors import expect
from rocm_msa.formats import e2m1, mxfp, nvfp4, nvfp4_lut
from rocm_msa.layout import Layout, pack

LUT_FOLD = nvfp4_lut.RECOMMENDED_FOLD_EXPONENT  # block scales of weights reach 448
PIECES = {"mxfp8": 2, "mxfp4": 1, "nvfp4": 1, "bf16": 4}
SCALE_BYTES = {"mxfp8": 1, "mxfp4": 1, "nvfp4": 2, "bf16": 0}  # a lane and chunk
GROUP = {"mxfp8": MX_GROUP, "mxfp4": MX_GROUP, "nvfp4": NVFP4_GROUP, "bf16": CHUNK}
HEAD_NORMS = ("q_norm", "k_norm", "index_q_norm", "index_k_norm")
PIECE_BYTES = 16
GLOBALS = 3  # of an expert: gate, up, down
PER_BYTE = {"mxfp4": 2, "nvfp4": 2}
_E4M3 = torch.float8_e4m3fn
_ALIGN = 256


@dataclass(frozen=True)
class Stored:
    """One linear as the checkpoint stores it.

    data: mxfp8 E4M3 or bf16 [N, K], mxfp4 and nvfp4 uint8 [N, K / 2]. scales: uint8 [N, K / group],
    the bytes; None for bf16. factor: of the whole tensor (NVFP4), else 1.
    """

    format: str
    data: torch.Tensor
    scales: torch.Tensor | None
    factor: float = 1.0

    @property
    def outputs(self) -> int:
        return self.data.shape[0]

    @property
    def inputs(self) -> int:
        return self.data.shape[1] * PER_BYTE.get(self.format, 1)

    def rows(self, first: int, count: int) -> Stored:
        """Outputs [first, first + count)."""
        part = slice(first, first + count)
        scales = None if self.scales is None else self.scales[part]
        return Stored(self.format, self.data[part], scales, self.factor)

    def columns(self, first: int, count: int) -> Stored:
        """Inputs [first, first + count), multiples of a scale's group."""
        each, group = PER_BYTE.get(self.format, 1), GROUP[self.format]
        data = self.data[:, first // each : (first + count) // each]
        scales = self.scales
        if scales is not None:
            scales = scales[:, first // group : (first + count) // group]
        return Stored(self.format, data, scales, self.factor)

    def dense(self, *, as_stored: bool = False) -> torch.Tensor:
        """fp32 [N, K] as the kernel multiplies it; NVFP4 through the table unless `as_stored`."""
        if self.format == "bf16":
            return self.data.float()
        if self.format == "mxfp8":
            return mxfp.mxfp8_dequantize(self.data, self.scales)
        if self.format == "mxfp4":
            return mxfp.mxfp4_dequantize(self.data, self.scales)
        if as_stored:
            return nvfp4.dequantize(self.data, self.scales.view(_E4M3), self.factor)
        values = nvfp4_lut.dequantize_via_lut(self.data, self.scales, LUT_FOLD).float()
        return values * (self.factor * 2.0**-LUT_FOLD)


def stack(parts: Sequence[Stored]) -> Stored:
    """Linears of one format and input as one, outputs in order."""
    kinds = {(p.format, p.factor) for p in parts}
    if len(kinds) > 1:
        raise ValueError(expect("parts", "one format and one factor", sorted(kinds)))
    scales = None if parts[0].scales is None else torch.cat([p.scales for p in parts])
    data = torch.cat([p.data.view(torch.uint8) for p in parts]).view(parts[0].data.dtype)
    return Stored(parts[0].format, data, scales, parts[0].factor)


# Bytes


def data_bytes(kind: str, outputs: int, inputs: int) -> int:
    """Of the packed data of a linear."""
    return outputs * inputs * PIECES[kind] * PIECE_BYTES * 64 // (TILE * CHUNK)


def scale_bytes(kind: str, outputs: int, inputs: int) -> int:
    """Of the packed scales of a linear."""
    return outputs * inputs * SCALE_BYTES[kind] * 64 // (TILE * CHUNK)


def pack_linear(stored: Stored) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(data uint8 [tiles, chunks, pieces, 64, 16], scales uint8 [tiles, chunks, 64, n] or None)."""
    tiles, chunks = stored.outputs // TILE, stored.inputs // CHUNK
    raw = stored.data.view(torch.uint8)
    if stored.format == "nvfp4":
        # [.., piece of k, g, 16] -> a lane's 32 values, two runs of 16, in words of eight.
        codes = e2m1.unpack(raw).reshape(tiles, TILE, chunks, 2, 4, 2, 2, 4)
        low, high = codes.unbind(-2)
        words = low | high << 4  # [tiles, TILE, chunks, 2, g, 2, 4]
        data = words.permute(0, 2, 4, 1, 3, 5, 6)
    else:
        pieces, order = PIECES[stored.format], (0, 2, 3, 4, 1, 5)
        data = raw.reshape(tiles, TILE, chunks, pieces, 4, PIECE_BYTES).permute(order)
    data = data.reshape(tiles, chunks, PIECES[stored.format], 64, PIECE_BYTES).contiguous()
    if stored.scales is None:
        return data, None
    count = SCALE_BYTES[stored.format]
    scales = stored.scales.reshape(tiles, TILE, chunks, count, 4).permute(0, 2, 4, 1, 3)
    return data, scales.reshape(tiles, chunks, 64, count).contiguous()


def weight_layout(shape: Shape) -> Layout:
    """Regions of a rank's weights of one layer, in bytes.

    input_norm, post_norm            bf16 [hidden]
    q_norm, k_norm, index_q_norm, index_k_norm    bf16 [128]
    router fp32 [experts, hidden], bias fp32 [experts]
    qkv, output, up, down, shared_up, shared_down, each with `_scales` where the format has them:
        packed linears, those of the experts one after another; up: a tile of gate, then one of up
    factors, shared_factors          fp32 [experts, 3], [3]: of gate, up, down
    """
    s = shape
    sizes = [("input_norm", 2 * s.hidden), ("post_norm", 2 * s.hidden)]
    sizes += [(name, 2 * HEAD_DIM) for name in HEAD_NORMS]
    sizes += [("router", 4 * s.experts * s.hidden), ("bias", 4 * s.experts)]
    linears = [
        ("qkv", s.attention_format, 1, s.features, s.hidden),
        ("output", s.attention_format, 1, s.hidden, s.attended),
        ("up", s.routed_format, s.experts, 2 * s.intermediate, s.hidden),
        ("down", s.routed_format, s.experts, s.hidden, s.intermediate),
    ]
    if s.shared:
        linears += [
            ("shared_up", s.shared_format, 1, 2 * s.shared, s.hidden),
            ("shared_down", s.shared_format, 1, s.hidden, s.shared),
        ]
    for name, kind, count, outputs, inputs in linears:
        sizes.append((name, count * data_bytes(kind, outputs, inputs)))
        if SCALE_BYTES[kind]:
            sizes.append((f"{name}_scales", count * scale_bytes(kind, outputs, inputs)))
    sizes += [("factors", 4 * GLOBALS * s.experts), ("shared_factors", 4 * GLOBALS)]
    return pack(sizes, align=_ALIGN, total_align=_ALIGN)


@dataclass(frozen=True)
class LayerWeights:
    """A rank's share, as stored. up: gate and up of an expert as two linears."""

    shape: Shape
    vectors: dict[str, torch.Tensor]  # norms bf16, router and bias fp32
    qkv: Stored
    output: Stored
    experts: list[tuple[Stored, Stored, Stored]]  # gate, up, down
    shared: tuple[Stored, Stored, Stored] | None

    def packed(self) -> torch.Tensor:
        """uint8 [weight_layout(shape).nbytes]."""
        layout = weight_layout(self.shape)
        out = torch.zeros(layout.nbytes, dtype=torch.uint8)

        def put(name: str, *parts: torch.Tensor) -> None:
            data = torch.cat([p.contiguous().view(torch.uint8).reshape(-1) for p in parts])
            region = layout[name]
            if data.numel() != region.nbytes:
                raise ValueError(expect(f"weights.{name}", f"{region.nbytes} bytes", data.numel()))
            out[region.offset : region.end] = data

        def put_linears(name: str, linears: list[Stored]) -> None:
            both = [pack_linear(linear) for linear in linears]
            put(name, *[data for data, _ in both])
            if both[0][1] is not None:
                put(f"{name}_scales", *[scales for _, scales in both])

        for name, vector in self.vectors.items():
            put(name, vector)
        put_linears("qkv", [self.qkv])
        put_linears("output", [self.output])
        put_linears("up", [_interleaved(gate, up) for gate, up, _ in self.experts])
        put_linears("down", [down for _, _, down in self.experts])
        put("factors", *[_factors(expert) for expert in self.experts])
        if self.shared:
            gate, up, down = self.shared
            put_linears("shared_up", [_interleaved(gate, up)])
            put_linears("shared_down", [down])
            put("shared_factors", _factors(self.shared))
        return out


def _interleaved(gate: Stored, up: Stored) -> Stored:
    """A tile of gate, then the tile of up that goes with it. The factors stay beside."""
    parts = []
    for tile in range(gate.outputs // TILE):
        for side in (gate, up):
            part = side.rows(tile * TILE, TILE)
            parts.append(Stored(part.format, part.data, part.scales))
    return stack(parts)


def _factors(expert: tuple[Stored, Stored, Stored]) -> torch.Tensor:
    return torch.tensor([linear.factor for linear in expert], dtype=torch.float32)


def format_errors(outputs: int = 1024, inputs: int = 1024, seed: int = 0) -> dict[str, float]:
    """Relative RMS error of heavy-tailed weights (Student's t, 4 degrees) in each form.

    "nvfp4 to mxfp4": stored as NVFP4, then encoded as MXFP4, which an MXFP4-only kernel needs.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(5, outputs, inputs, generator=generator)
    x = normal[0] / (normal[1:].square().mean(0)).sqrt() * inputs**-0.5
    factor = float(x.abs().max()) / (6.0 * 448.0)
    data, scales = nvfp4.quantize(x, factor)
    one = Stored("nvfp4", data, scales.view(torch.uint8), factor)
    exact = one.dense(as_stored=True)
    forms = {
        "mxfp4": mxfp.mxfp4_dequantize(*mxfp.mxfp4_quantize(x)),
        "nvfp4": exact,
        "nvfp4, table": one.dense(),
        "nvfp4 to mxfp4": mxfp.mxfp4_dequantize(*mxfp.mxfp4_quantize(exact)),
    }
    norm = x.square().mean().sqrt()
    return {name: float((y - x).square().mean().sqrt() / norm) for name, y in forms.items()}

"""A step of a layer with MiniMax-M3's own widths: random weights, made where they are needed.

A rank's experts are a gigabyte. An expert's linears are made from its number and forgotten again,
and only those that a row may go through are written into the kernel's memory: the rest stays zero.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from mono_kernel import reference
from mono_kernel.shapes import HEAD_DIM, TILE, Formats, Shape
from mono_kernel.weights import (
    GLOBALS,
    HEAD_NORMS,
    LayerWeights,
    Stored,
    data_bytes,
    pack_linear,
    scale_bytes,
    stack,
    weight_layout,
)
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.formats import mxfp
from tests.mono_kernel.steps import Step
from tests.ops.cases import random_values

FORMATS = {
    "mxfp4": Formats("bf16", "mxfp4", "mxfp4"),
    "mxfp8": Formats("mxfp8", "mxfp4", "mxfp4"),
    "nvfp4": Formats("mxfp8", "nvfp4", "mxfp8"),
}
MARGIN = 2  # experts of a row beyond the reference's choice that are written, too


def random_linear(kind: str, outputs: int, inputs: int, seed: int) -> Stored:
    """Values of a deviation of about inputs^-1/2, in every code and many scales."""
    generator = torch.Generator().manual_seed(seed)

    def codes(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    if kind == "bf16":
        x = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
        return Stored(kind, x.to(torch.bfloat16), None)
    if kind == "mxfp8":
        x = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
        return Stored(kind, *mxfp.mxfp8_quantize(x))
    data = codes(0, 256, outputs, inputs // 2)
    if kind == "mxfp4":  # E8M0: 2^-9 .. 2^-7
        return Stored(kind, data, codes(118, 121, outputs, inputs // 32))
    # E4M3: 0.5 .. 1.875 and a factor of the tensor.
    scales = codes(0x30, 0x40, outputs, inputs // 16)
    return Stored(kind, data, scales, inputs**-0.5 / 3 * (1 + seed % 7 / 8))


class Experts:
    """experts[e]: gate, up and down of expert e on a rank."""

    def __init__(self, shape: Shape, kind: str, width: int, seed: int) -> None:
        self.shape, self.kind, self.width, self.seed = shape, kind, width, seed

    def __getitem__(self, expert: int) -> tuple[Stored, Stored, Stored]:
        s, first = self.shape, self.seed + GLOBALS * expert
        sizes = [(self.width, s.hidden)] * 2 + [(s.hidden, self.width)]
        return tuple(random_linear(self.kind, *size, first + i) for i, size in enumerate(sizes))


def rank_weights(shape: Shape, rank: int) -> LayerWeights:
    """The same norms and router on every rank; ranks that hold the same KV and index heads have the
    same weights for them; everything else is a rank's own."""
    s, seed = shape, 1000 * (rank + 1)
    norms = {"input_norm": s.hidden, "post_norm": s.hidden, **dict.fromkeys(HEAD_NORMS, HEAD_DIM)}
    vectors = {
        name: random_values(i, size, scale=0.1).bfloat16()
        for i, (name, size) in enumerate(norms.items())
    }
    vectors["router"] = random_values(90, s.experts, s.hidden, scale=s.hidden**-0.5)
    vectors["bias"] = random_values(91, s.experts, scale=0.1)
    kind, size, queries = s.attention_format, (s.features, s.hidden), s.q_heads * HEAD_DIM
    own = random_linear(kind, *size, seed)
    held = random_linear(kind, *size, 1000 * (rank // s.kv_replicas + 1))
    # The index key has one head, the same on every rank.
    key = random_linear(kind, HEAD_DIM, s.hidden, 1)
    rest = held.rows(queries, s.features - queries - HEAD_DIM)
    qkv = stack([own.rows(0, queries), rest, key])
    output = random_linear(s.attention_format, s.hidden, s.attended, seed + 1)
    experts = Experts(s, s.routed_format, s.intermediate, seed + 2)
    shared = Experts(s, s.shared_format, s.shared, seed + 2)[s.experts]
    return LayerWeights(s, vectors, qkv, output, experts, shared)


class WideStep(Step):
    """`layout`: a key of FORMATS."""

    def _weights(self, rank: int) -> LayerWeights:
        return rank_weights(Shape.of(MINIMAX_M3, self.tp, FORMATS[self.layout]), rank)

    @functools.cached_property
    def written(self) -> list[int]:
        """Experts that a row may go through: the reference's choice and what comes next to it."""
        logits = self.reference_of_attention()
        bias, count = self.weights[0].vectors["bias"], self.shape.chosen + MARGIN
        return (logits.sigmoid() + bias).topk(count).indices.unique().tolist()

    def reference_of_attention(self) -> torch.Tensor:
        """The router's logits by the reference."""
        found = []
        for w, caches in zip(self.weights, self.copies(), strict=True):
            r = reference.norm(w, self.hidden, self.residual)
            r |= reference.project(w, r)
            r |= reference.insert(w, r, self.batch, caches)
            r |= reference.score(r, self.batch, caches[1])
            r |= reference.attend(w.shape, r, self.batch, caches[0])
            found.append(r | reference.join(w, r))
        parts = [reference.output_part(w, r) for w, r in zip(self.weights, found, strict=True)]
        total = reference.add(found[0]["stream"], reference.in_rank_order(parts))
        return reference.route(self.weights[0], {"residual_out": total})["logits"]

    def packed(self, rank: int) -> torch.Tensor:
        w, layout = self.weights[rank], weight_layout(self.shape)
        # Memory that nobody touches is not there.
        out = torch.from_numpy(np.zeros(layout.nbytes, np.uint8))

        def put(name: str, x: torch.Tensor, first: int = 0) -> None:
            data = x.contiguous().view(torch.uint8).reshape(-1)
            at = layout[name].offset + first
            assert at + data.numel() <= layout[name].end, name
            out[at : at + data.numel()] = data

        def put_linear(name: str, linear: Stored, number: int = 0) -> None:
            size = linear.format, linear.outputs, linear.inputs
            data, scales = pack_linear(linear)
            put(name, data, number * data_bytes(*size))
            if scales is not None:
                put(f"{name}_scales", scales, number * scale_bytes(*size))

        def put_expert(prefix: str, number: int, expert: tuple[Stored, ...]) -> None:
            gate, up, down = expert
            tiles = range(0, gate.outputs, TILE)
            both = [replace_factor(x.rows(t, TILE)) for t in tiles for x in (gate, up)]
            put_linear(f"{prefix}up", stack(both), number)
            put_linear(f"{prefix}down", down, number)
            factors = torch.tensor([linear.factor for linear in expert])
            put(f"{'shared_' if prefix else ''}factors", factors, 4 * GLOBALS * number)

        for name, vector in w.vectors.items():
            put(name, vector)
        put_linear("qkv", w.qkv)
        put_linear("output", w.output)
        put_expert("shared_", 0, w.shared)
        for number in self.written:
            put_expert("", number, w.experts[number])
        return out


def replace_factor(part: Stored) -> Stored:
    """Without its factor, which lies beside."""
    return Stored(part.format, part.data, part.scales)

"""Traced code of qkv_insert for gfx950.

    wave = one head of build.wave_tokens tokens      lane = 8 neighbouring values of one of them
    a lane loads 8 values, normalises (lanes of a head exchange sums), rotates (lanes exchange the
    other half), rounds to the activation dtype, and stores to q, index_q or, encoded, to a page

Value heads skip norm and rotation by a selection, so that all waves run the same code up to the
stores. What a wave stores depends on its head alone: no divergence but for dead tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.device import quantise
from rocm_msa.device.convert import bf16_values, bf16_word, f16_values, f16_word
from rocm_msa.device.memory import Bytes, global_address, global_bytes
from rocm_msa.device.norm import gemma_norm
from rocm_msa.device.rope import rotate
from rocm_msa.device.wave import WAVE, lane_id, wave_id
from rocm_msa.flydsl_compile import Compiled, compile_kernel
from rocm_msa.layout import Layout
from rocm_msa.ops.qkv_insert.flydsl_gfx950 import ALIGN, LANE_VALUES, WAVES, Build

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def _load(place: Bytes, dtype: str) -> tuple[list, list]:
    """A lane's 8 values at `place`: (fp32 values, the words they came in)."""
    words = []
    for i in range(LANE_VALUES * ITEM_BYTES[dtype] // ALIGN):
        vector = place.load(fx.Uint32, 4, offset=i * ALIGN)
        words += [vector[j] for j in range(4)]
    return _values(words, dtype), words


def _vector(values: list) -> fx.Vector:
    return fx.Vector.from_elements(values, fx.Float32)


def _values(words: list, dtype: str) -> list:
    if dtype == "fp32":
        return [word.bitcast(fx.Float32) for word in words]
    unpack = bf16_values if dtype == "bf16" else f16_values
    return [x for word in words for x in unpack(word)]


def _rounded_words(values: list, dtype: str) -> list:
    """8 fp32 values in the activation dtype, nearest even."""
    if dtype == "fp32":
        return [x.bitcast(fx.Uint32) for x in values]
    pack = bf16_word if dtype == "bf16" else f16_word
    return [fx.Uint32(pack(values[i], values[i + 1])) for i in range(0, LANE_VALUES, 2)]


def _store(place: Bytes, words: list, align: int = ALIGN) -> None:
    for i in range(0, len(words), 4):
        part = words[i : i + 4]
        value = part[0] if len(part) == 1 else fx.Vector.from_elements(part, fx.Uint32)
        place.store(value, offset=4 * i, align=align)


def _integer(address: fx.Int64, step: fx.Int32, high_at: fx.Int32, i: fx.Int32) -> fx.Int64:
    """Element i of an int32 (high_at 0) or int64 (high_at 4) vector, `step` bytes apart."""
    place = global_address(address).at(fx.Int64(fx.Uint32(i * step)))
    low = place.load(fx.Int32)
    high = (high_at == 0).select(low >> 31, place.load(fx.Int32, offset=high_at))
    return (fx.Int64(high) << 32) | fx.Int64(fx.Uint32(low))


def _address(pointer: fx.Pointer) -> fx.Int64:
    return fx.Int64(fx.ptrtoint(pointer))


@dataclass(frozen=True)
class _Kind:
    """Which part of the fused projection a wave's head lies in: q, k, v, index q or index k."""

    before_k: fx.Boolean
    before_v: fx.Boolean
    before_index: fx.Boolean
    before_index_k: fx.Boolean
    is_query: fx.Boolean  # q or index q

    @classmethod
    def of(cls, build: Build, head: fx.Int32) -> _Kind:
        first_v, first_index = build.q + build.kv, build.q + 2 * build.kv
        before_index, before_index_k = head < first_index, head < first_index + build.index
        is_query = (head < build.q) | ((head >= first_index) & before_index_k)
        return cls(head < build.q, head < first_v, before_index, before_index_k, is_query)

    def pick(self, q, k, v, index_q, index_k):
        """The one of five values that belongs to the head."""
        index = self.before_index_k.select(index_q, index_k)
        found = self.before_v.select(k, self.before_index.select(v, index))
        return self.before_k.select(q, found)

    def either(self, main, index):
        """One value for q, k and v, another for the index branch."""
        return self.before_index.select(main, index)


@dataclass(frozen=True)
class _Target:
    """Where a head's vectors go in a cache. base: address of the head's run in page 0; stride:
    bytes between pages; data, scales: byte offsets in the run; scale: the global one."""

    base: fx.Int64
    stride: fx.Int64
    scale: fx.Float32
    data: fx.Int32
    scales: fx.Int32


def _encode_and_store(
    values: list, target: _Target, slot: fx.Int64, part: fx.Int32, dtype: CacheDType, head_dim: int
) -> None:
    """Encode a lane's 8 values and store them and, from every second lane, the block scale."""
    token = fx.Int32(slot) & (BLOCK_TOKENS - 1)
    page = global_address(target.base + (slot >> (BLOCK_TOKENS.bit_length() - 1)) * target.stride)
    row = dtype.data_bytes(head_dim)
    lane_bytes = row * LANE_VALUES // head_dim
    place = page.at(target.data + token * row + part * lane_bytes)
    if dtype is CacheDType.NVFP4:
        word, scale = quantise.nvfp4(values, target.scale)
        _store(place, [word], align=1)
        groups = dtype.scale_bytes(head_dim)
        at = target.scales + token * groups + (part >> 1)
        _store_scale(page.at(at), scale, part)
    elif dtype is CacheDType.FP8:
        _store(place, quantise.fp8(values, target.scale), align=1)
    else:
        _store(place, quantise.bf16(values), align=1)


@flyc.jit
def _store_scale(place: Bytes, scale: fx.Int32, part: fx.Int32):
    if (part & 1) == 0:
        place.store(scale.to(fx.Uint8))


def _region(layout: Layout, name: str) -> int:
    return layout[name].offset if name in layout else 0


@flyc.jit
def insert_head(build, a, head, first_token):
    """One wave: head `head` of the tokens first_token .. + build.wave_tokens.

    Args:
        a: the kernel's arguments by name, pointers among them as fx.Pointer.
        head, first_token: Int32; heads beyond the projection's are nobody's.
    """
    q_heads, kv, index = build.q, build.kv, build.index
    first_v, first_index = q_heads + kv, q_heads + 2 * kv
    lanes, dim, dtype = build.head_lanes, build.head_dim, build.dtype
    item = ITEM_BYTES[dtype]
    main_dtype = CacheDType(build.main_dtype)
    index_dtype = CacheDType(build.index_dtype) if index else None
    head_bytes = build.main_layout.nbytes
    # q, k, v, index_q, index_k
    data_offsets = [0, 0, build.main_layout["v_data"].offset, 0, 0]
    scale_offsets = [0, *(_region(build.main_layout, n) for n in ("k_scales", "v_scales")), 0]
    scale_offsets.append(_region(build.index_layout, "k_scales") if index else 0)
    half = build.rotary_dim // 2
    half_lanes = half // LANE_VALUES
    rope_item = ITEM_BYTES[build.rope_dtype]
    lane = lane_id()
    part = lane % lanes
    token = first_token + lane // lanes
    live = token < a.tokens
    t = live.select(token, a.tokens - 1)  # dead lanes load what the last token does
    if head < build.heads:
        kind = _Kind.of(build, head)
        pick, either = kind.pick, kind.either

        # First all loads, so that their latencies overlap.
        offset = fx.Int64(head * (dim * item) + part * (LANE_VALUES * item))
        raw, raw_words = _load(global_bytes(a.qkv).at(fx.Int64(t) * a.qkv_row + offset), dtype)
        position = _integer(_address(a.positions), a.position_step, a.position_high, t)
        slot = _integer(
            either(_address(a.main_slots), _address(a.index_slots)),
            either(a.main_slot_step, a.index_slot_step),
            either(a.main_slot_high, a.index_slot_high),
            t,
        )
        w = [_address(p) for p in (a.weight_q, a.weight_k, a.weight_index_q, a.weight_index_k)]
        weight = global_address(pick(w[0], w[1], w[1], w[2], w[3]))
        at = part * (LANE_VALUES * ITEM_BYTES[build.weight_dtype])
        weights, _ = _load(weight.at(at), build.weight_dtype)
        position = fx.max(fx.min(position, fx.Int64(a.max_position - 1)), fx.Int64(0))
        angle = (part & (half_lanes - 1)) * (LANE_VALUES * rope_item)
        angles = global_bytes(a.cos_sin).at(position * a.cos_sin_row + fx.Int64(angle))
        cos, _ = _load(angles, build.rope_dtype)
        sin, _ = _load(angles.at(half * rope_item), build.rope_dtype)

        normed = gemma_norm(_vector(raw), _vector(weights), a.eps, lanes)
        turned = normed
        if part < 2 * half_lanes:
            turned = rotate(normed, _vector(cos), _vector(sin), part, half_lanes)
        rounded = _rounded_words([turned[i] for i in range(LANE_VALUES)], dtype)
        is_v = kind.before_index & (head >= first_v)
        words = [is_v.select(v, n) for v, n in zip(raw_words, rounded, strict=True)]

        if kind.is_query:
            count = either(fx.Int32(q_heads), fx.Int32(index))
            first = either(fx.Int32(0), fx.Int32(first_index))
            vector = fx.Int64(token) * fx.Int64(count) + fx.Int64(head - first)
            out = either(_address(a.q_out), _address(a.index_q_out))
            place = global_address(out + vector * (dim * item)).at(part * (LANE_VALUES * item))
            if live:
                _store(place, words)
        else:
            slots = either(a.main_limit, a.index_limit)
            target = _Target(
                pick(
                    fx.Int64(0),
                    _address(a.main_pages) + fx.Int64((head - q_heads) * head_bytes),
                    _address(a.main_pages) + fx.Int64((head - first_v) * head_bytes),
                    fx.Int64(0),
                    _address(a.index_pages),
                ),
                either(a.main_stride, a.index_stride),
                pick(a.k_scale, a.k_scale, a.v_scale, a.index_scale, a.index_scale),
                pick(*[fx.Int32(n) for n in data_offsets]),
                pick(*[fx.Int32(n) for n in scale_offsets]),
            )
            if live & (slot >= fx.Int64(0)) & (slot < slots):
                values = _values(words, dtype)
                if fx.const_expr(index == 0 or build.index_dtype == build.main_dtype):
                    _encode_and_store(values, target, slot, part, main_dtype, dim)
                else:
                    if kind.before_index:
                        _encode_and_store(values, target, slot, part, main_dtype, dim)
                    else:
                        _encode_and_store(values, target, slot, part, index_dtype, dim)


def compile_build(build: Build) -> Compiled:
    @flyc.kernel(name=build.symbol)
    def kernel(
        qkv: fx.Pointer,  # [tokens, heads * head_dim]
        qkv_row: fx.Int64,  # bytes
        tokens: fx.Int32,
        weight_q: fx.Pointer,  # [head_dim] each
        weight_k: fx.Pointer,
        weight_index_q: fx.Pointer,
        weight_index_k: fx.Pointer,
        eps: fx.Float32,
        cos_sin: fx.Pointer,  # [max_position, rotary_dim]
        cos_sin_row: fx.Int64,  # bytes
        max_position: fx.Int32,
        positions: fx.Pointer,  # [tokens] int32 or int64; step and high: see _integer
        position_step: fx.Int32,
        position_high: fx.Int32,
        main_slots: fx.Pointer,  # [tokens]
        main_slot_step: fx.Int32,
        main_slot_high: fx.Int32,
        index_slots: fx.Pointer,  # [tokens]
        index_slot_step: fx.Int32,
        index_slot_high: fx.Int32,
        main_pages: fx.Pointer,
        main_stride: fx.Int64,  # bytes
        main_limit: fx.Int64,  # slots
        k_scale: fx.Float32,
        v_scale: fx.Float32,
        index_pages: fx.Pointer,
        index_stride: fx.Int64,
        index_limit: fx.Int64,
        index_scale: fx.Float32,
        q_out: fx.Pointer,  # [tokens, q, head_dim]
        index_q_out: fx.Pointer,  # [tokens, index, head_dim]
    ):
        a = SimpleNamespace(
            qkv=qkv, qkv_row=qkv_row, tokens=tokens, weight_q=weight_q, weight_k=weight_k,
            weight_index_q=weight_index_q, weight_index_k=weight_index_k, eps=eps,
            cos_sin=cos_sin, cos_sin_row=cos_sin_row, max_position=max_position,
            positions=positions, position_step=position_step, position_high=position_high,
            main_slots=main_slots, main_slot_step=main_slot_step, main_slot_high=main_slot_high,
            index_slots=index_slots, index_slot_step=index_slot_step,
            index_slot_high=index_slot_high, main_pages=main_pages, main_stride=main_stride,
            main_limit=main_limit, k_scale=k_scale, v_scale=v_scale, index_pages=index_pages,
            index_stride=index_stride, index_limit=index_limit, index_scale=index_scale,
            q_out=q_out, index_q_out=index_q_out,
        )  # fmt: skip
        head = fx.Int32(fx.block_idx.y) * WAVES + wave_id()
        insert_head(build, a, head, fx.Int32(fx.block_idx.x) * build.wave_tokens)

    return compile_kernel(kernel, WAVES * WAVE)

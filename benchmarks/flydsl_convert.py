"""The peer's first kernel: NVFP4 pages -> FP8 pages, by the same table, in FlyDSL for gfx950.

One workgroup a (listed page, KV head), a wave a tile of 16 tokens; K and V of a page are read once
and written once, in the standard order of FP8 pages. Only the benchmark uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import rocdl

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.device import nvfp4, wave
from rocm_msa.device.memory import global_bytes, lds_regions
from rocm_msa.flydsl_compile import Compiled, compile_flydsl
from rocm_msa.ops.flydsl_page import TILES, Format, load_tile

LANES = TILES * wave.WAVE
# Bytes e0 o0 e1 o1 and e2 o2 e3 o3 of an even word (0..3) and an odd one (4..7).
INTERLEAVE = (0x05010400, 0x07030602)


@dataclass(frozen=True)
class Convert:
    """No parameters: head_dim is 128."""

    symbol: str = "convert_nvfp4_to_fp8"
    grid: str = "(listed pages, KV heads)"


def _ordered(found: list) -> list[fx.Vector]:
    """Even and odd words in turn -> 32 E4M3 values in order, as two pieces of 16 bytes."""
    words = []
    for even, odd in zip(found[0::2], found[1::2], strict=True):
        words += [fx.Uint32(rocdl.perm_b32(odd, even, fx.Uint32(s))) for s in INTERLEAVE]
    return [fx.Vector.from_elements(words[4 * i : 4 * i + 4], fx.Uint32) for i in (0, 1)]


def compile_build(build: Convert) -> Compiled:
    source, target = Format.of(CacheDType.NVFP4), Format.of(CacheDType.FP8)

    @flyc.kernel(name=build.symbol)
    def kernel(
        pages: fx.Pointer,  # uint8 [num_pages, page bytes], NVFP4
        stride: fx.Int64,  # bytes from page to page
        lut: fx.Pointer,  # uint8 [256, 8]
        listed: fx.Pointer,  # int32 [listed pages]
        out: fx.Pointer,  # out: uint8 [listed pages, page bytes], FP8
        out_stride: fx.Int64,
    ):
        item, head = fx.block_idx.x, fx.block_idx.y
        lane, w = wave.lane_id(), wave.wave_id()
        table = lds_regions(nvfp4.TABLE_BYTES)[0]
        nvfp4.copy_table(global_bytes(lut), table, fx.thread_idx.x, LANES)
        number = global_bytes(listed).uniform(fx.Int32, offset=fx.Int64(item) * 4)
        at = fx.Int64(number) * stride + fx.Int64(head * source.page.head_bytes)
        loaded = [load_tile(source, global_bytes(pages).at(at), side, w, lane) for side in "kv"]
        fx.barrier()
        at = fx.Int64(item) * out_stride + fx.Int64(head * target.page.head_bytes)
        place = global_bytes(out).at(at).at(w * 2048 + (lane % 16) * 128 + (lane // 16) * 32)
        for side, (words, scales) in zip("kv", loaded, strict=True):
            rows = nvfp4.scale_rows(table, fx.Uint32(scales))
            found = nvfp4.dequantise_chunk(words, rows)
            first = target.page.head_layout[f"{side}_data"].offset
            for i, piece in enumerate(_ordered([found[j] for j in range(8)])):
                place.store(piece, offset=first + 16 * i)

    @flyc.jit
    def launch(
        pages: fx.Pointer,
        stride: fx.Int64,
        lut: fx.Pointer,
        listed: fx.Pointer,
        out: fx.Pointer,
        out_stride: fx.Int64,
    ):
        kernel(pages, stride, lut, listed, out, out_stride).launch(
            grid=(1, 1, 1), block=(LANES, 1, 1)
        )

    p = flyc.from_c_void_p(fx.Uint32, None, assumed_align=16)
    return compile_flydsl(launch, p, 1, p, p, p, 1, line_info=False)

"""The traced code of toy.py. FlyDSL resolves annotations in a module's globals: hence this file."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from rocm_msa.flydsl_compile import Compiled, compile_flydsl
from tests.launcher.toy import LANES, Build


def compile_kernel(build: Build) -> Compiled:
    @flyc.kernel(name=build.symbol)
    def kernel(x: fx.Pointer, y: fx.Pointer, a: fx.Float32, count: fx.Int32, wide: fx.Int64):
        lds = fx.SharedAllocator(static=False)
        lds = lds.allocate(fx.Array[fx.Float32, LANES, 16]).peek().ptr
        lane = fx.thread_idx.x
        i = fx.block_idx.x * LANES + lane
        lds[lane] = fx.Float32(build.offset)
        fx.barrier()
        if i < count:
            value = x[i] * a + lds[LANES - 1 - lane]
            if fx.const_expr(build.twice):
                value = value * 2.0
            y[i] = value + fx.Float32(fx.Int32(wide >> 41))

    @flyc.jit
    def launch(x: fx.Pointer, y: fx.Pointer, a: fx.Float32, count: fx.Int32, wide: fx.Int64):
        kernel(x, y, a, count, wide).launch(grid=(1, 1, 1), block=(LANES, 1, 1))

    null = flyc.from_c_void_p(fx.Float32, None, assumed_align=16)
    return compile_flydsl(launch, null, null, 1.0, 1, fx.Int64(1), line_info=False)

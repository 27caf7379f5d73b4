"""FlyDSL kernels for the emulator's tests: copies, a reduction, LDS transposes.

Each `_name()` function builds and compiles one kernel; pointers are untyped global memory.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch
from flydsl.expr import rocdl

from rocm_msa.flydsl_compile import Compiled, compile_flydsl
from tests.emulator.cases import Args, Case, Expected, Tolerance, generator, normal, one_rank

WAVE = 64
BLOCK = 256
COPY_ELEMENTS = 3000  # the last workgroup is not full
TILE = 64  # of the transpose through LDS
LDS_ROW = TILE + 1  # words: one more than the tile, so that columns lie in different banks


def pointer(dtype=fx.Float32, align: int = 16):
    """A null pointer: it specialises a kernel and cannot be launched."""
    return flyc.from_c_void_p(dtype, None, assumed_align=align)


def shared(dtype, count: int):
    """A pointer to `count` elements of static LDS; to be called while a kernel is traced."""
    return fx.SharedAllocator().allocate(fx.Array[dtype, count, 16]).peek().ptr


# Copies


def _copy() -> Compiled:
    @flyc.kernel(name="copy")
    def kernel(source: fx.Pointer, target: fx.Pointer, count: fx.Int32):
        i = fx.block_idx.x * BLOCK + fx.thread_idx.x
        if i < count:
            target[i] = source[i] * 2.0

    @flyc.jit
    def launch(source: fx.Pointer, target: fx.Pointer, count: fx.Int32):
        kernel(source, target, count).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))

    return compile_flydsl(launch, pointer(), pointer(), 1)


def _copy_vector() -> Compiled:
    @flyc.kernel(name="copy_vector")
    def kernel(source: fx.Pointer, target: fx.Pointer):
        i = (fx.block_idx.x * BLOCK + fx.thread_idx.x) * 4
        fx.generic_store(target + i, fx.generic_load(source + i, count=4))

    @flyc.jit
    def launch(source: fx.Pointer, target: fx.Pointer):
        kernel(source, target).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))

    return compile_flydsl(launch, pointer(), pointer())


def _copy_lds_dma() -> Compiled:
    """Global memory to LDS without registers, 16 bytes a lane; each wave reads its own part."""

    @flyc.kernel(name="copy_lds_dma")
    def kernel(source: fx.Pointer, target: fx.Pointer):
        lds = shared(fx.Float32, BLOCK * 4)
        lane = fx.thread_idx.x
        first = fx.block_idx.x * (BLOCK * 4)
        # The hardware adds 16 bytes a lane to the wave's base in LDS.
        wave = rocdl.readfirstlane(fx.Int32.ir_type, (lane // WAVE).ir_value())
        base = lds + fx.Int32(wave) * (WAVE * 4)
        rocdl.global_load_lds((source + first + lane * 4).llvm_ptr, base.llvm_ptr, 16, 0)
        rocdl.s_waitcnt(vmcnt=0)
        fx.barrier()
        # The next wave's part, so that the barrier matters.
        other = (lane + WAVE) % BLOCK
        fx.generic_store(target + first + other * 4, fx.generic_load(lds + other * 4, count=4))

    @flyc.jit
    def launch(source: fx.Pointer, target: fx.Pointer):
        kernel(source, target).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))

    return compile_flydsl(launch, pointer(), pointer())


def _gather() -> Compiled:
    """Rows by a table, both through buffer descriptors: what lies beyond their ends reads as 0."""

    @flyc.kernel(name="gather")
    def kernel(
        table: fx.Pointer,
        source: fx.Pointer,
        target: fx.Pointer,
        groups: fx.Int32,
        count: fx.Int32,
    ):
        group, lane = fx.block_idx.x, fx.thread_idx.x
        rows = rocdl.make_buffer_ptr(table, num_records_bytes=fx.Int64(groups) * 4)
        data = rocdl.make_buffer_ptr(source, num_records_bytes=fx.Int64(count) * 4)
        i = rocdl.s_buffer_load(rows, group) * BLOCK + lane
        zero = fx.Int32(0).ir_value()
        got = rocdl.raw_ptr_buffer_load(
            fx.Float32.ir_type, rocdl.get_buffer_rsrc(data), (i * 4).ir_value(), zero, zero
        )
        target[group * BLOCK + lane] = fx.Float32(got)

    @flyc.jit
    def launch(
        table: fx.Pointer,
        source: fx.Pointer,
        target: fx.Pointer,
        groups: fx.Int32,
        count: fx.Int32,
    ):
        kernel(table, source, target, groups, count).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))

    return compile_flydsl(launch, pointer(fx.Int32), pointer(), pointer(), 1, 1)


def _gather_args(seed: int) -> Args:
    groups, rows, count = 6, 8, 7 * BLOCK + 100
    table = torch.randperm(rows, generator=generator(seed)).int()
    table[:2] = torch.tensor([rows - 1, rows + 3])  # partly and wholly beyond the end
    source = normal((rows * BLOCK,), seed)
    return one_rank(table, source, torch.ones(groups * BLOCK), groups, count)


def _expected_gather(args: Args) -> Expected:
    table, source, _, groups, count = args[0]
    places = table[:groups, None].long() * BLOCK + torch.arange(BLOCK)
    valid = places < count
    found = torch.where(valid, source[torch.where(valid, places, 0)], 0.0)
    return ({2: found.flatten()},)


# A reduction


def _reduce() -> Compiled:
    """Sum within lanes, waves (shuffles), the workgroup (LDS), the grid (an atomic)."""

    @flyc.kernel(name="reduce")
    def kernel(source: fx.Pointer, total: fx.Pointer):
        lds = shared(fx.Float32, BLOCK // WAVE)
        lane = fx.thread_idx.x
        i = (fx.block_idx.x * BLOCK + lane) * 4
        values = fx.generic_load(source + i, count=4)
        value = values[0] + values[1] + values[2] + values[3]
        for step in fx.range_constexpr(6):
            value = value + fx.shuffle_xor(value, 1 << step, WAVE)
        if lane % WAVE == 0:
            lds[lane // WAVE] = value
        fx.barrier()
        if lane == 0:
            fx.atomic_add(total, lds[0] + lds[1] + lds[2] + lds[3], syncscope="agent")

    @flyc.jit
    def launch(source: fx.Pointer, total: fx.Pointer):
        kernel(source, total).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))

    return compile_flydsl(launch, pointer(), pointer())


# Transposes through LDS


def _transpose() -> Compiled:
    @flyc.kernel(name="transpose")
    def kernel(source: fx.Pointer, target: fx.Pointer):
        lds = shared(fx.Float32, TILE * LDS_ROW)
        column, row = fx.thread_idx.x % TILE, fx.thread_idx.x // TILE
        for step in fx.range_constexpr(TILE * TILE // BLOCK):
            r = row + step * (BLOCK // TILE)
            lds[r * LDS_ROW + column] = source[r * TILE + column]
        fx.barrier()
        for step in fx.range_constexpr(TILE * TILE // BLOCK):
            r = row + step * (BLOCK // TILE)
            target[r * TILE + column] = lds[column * LDS_ROW + r]

    @flyc.jit
    def launch(source: fx.Pointer, target: fx.Pointer):
        kernel(source, target).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))

    return compile_flydsl(launch, pointer(), pointer())


def _transpose_read(bits: int) -> Compiled:
    """One ds_read_b64_tr_b<bits> of 64 x 8 bytes, as each lane gets them."""
    read = {
        4: rocdl.ds_read_tr4_b64_,
        8: rocdl.ds_read_tr8_b64_,
        16: rocdl.ds_read_tr16_b64_,
    }[bits]

    @flyc.kernel(name=f"transpose_read_{bits}")
    def kernel(source: fx.Pointer, target: fx.Pointer):
        lds = shared(fx.Int32, WAVE * 2)
        i = fx.thread_idx.x * 2
        fx.generic_store(lds + i, fx.generic_load(source + i, count=2))
        fx.barrier()
        if fx.const_expr(bits == 16):
            kind = fx.Vector.make_type(4, fx.Int16)
        else:
            kind = fx.Vector.make_type(2, fx.Int32)
        got = fx.Vector(read(kind, (lds + i).llvm_ptr)).bitcast(fx.Int32)
        fx.generic_store(target + i, got)

    @flyc.jit
    def launch(source: fx.Pointer, target: fx.Pointer):
        kernel(source, target).launch(grid=(1, 1, 1), block=(WAVE, 1, 1))

    return compile_flydsl(launch, pointer(fx.Int32), pointer(fx.Int32))


def _expected_transpose_read(args: Args, bits: int) -> Expected:
    """In each group of 16 lanes: a tile of 64 / bits rows of 16 elements; lane i gets column i."""
    source = args[0][0].view(torch.uint8)
    if bits == 4:
        parts = torch.stack([source & 15, source >> 4], dim=-1).flatten()
    else:
        parts = source.view({8: torch.uint8, 16: torch.int16}[bits])
    tiles = parts.view(4, 64 // bits, 16).transpose(1, 2).contiguous().flatten()
    if bits == 4:
        pairs = tiles.view(-1, 2)
        tiles = pairs[:, 0] | pairs[:, 1] << 4
    return ({1: tiles.view(torch.int32)},)


def _transpose_read_case(bits: int) -> Case:
    def make_args(seed: int) -> Args:
        source = torch.randint(-(2**31), 2**31 - 1, (WAVE * 2,), generator=generator(seed))
        source = source.to(torch.int32)
        return one_rank(source, torch.zeros_like(source))

    return Case(
        f"flydsl_transpose_read_{bits}",
        lambda: _transpose_read(bits),
        make_args,
        (1, 1, 1),
        (WAVE, 1, 1),
        lambda args: _expected_transpose_read(args, bits),
    )


def _vector_args(seed: int) -> Args:
    source = normal((2 * BLOCK * 4,), seed)
    return one_rank(source, torch.zeros_like(source))


CASES = [
    Case(
        "flydsl_copy",
        _copy,
        lambda seed: one_rank(
            normal((COPY_ELEMENTS,), seed), torch.zeros(COPY_ELEMENTS), COPY_ELEMENTS
        ),
        (-(-COPY_ELEMENTS // BLOCK), 1, 1),
        (BLOCK, 1, 1),
        lambda args: ({1: args[0][0] * 2},),
    ),
    *(
        Case(
            f"flydsl_{name}",
            build,
            _vector_args,
            (2, 1, 1),
            (BLOCK, 1, 1),
            lambda args: ({1: args[0][0]},),
        )
        for name, build in (("copy_vector", _copy_vector), ("copy_lds_dma", _copy_lds_dma))
    ),
    Case(
        "flydsl_gather",
        _gather,
        _gather_args,
        (6, 1, 1),
        (BLOCK, 1, 1),
        _expected_gather,
    ),
    Case(
        "flydsl_reduce",
        _reduce,
        lambda seed: one_rank(normal((4 * BLOCK * 4,), seed), torch.zeros(1)),
        (4, 1, 1),
        (BLOCK, 1, 1),
        lambda args: ({1: args[0][0].double().sum().float().reshape(1)},),
        Tolerance(1e-5, 1e-3),
    ),
    Case(
        "flydsl_transpose",
        _transpose,
        lambda seed: one_rank(normal((TILE, TILE), seed), torch.zeros(TILE, TILE)),
        (1, 1, 1),
        (BLOCK, 1, 1),
        lambda args: ({1: args[0][0].T.contiguous()},),
    ),
    *map(_transpose_read_case, (4, 8, 16)),
]

"""FlyDSL kernels for the emulator's tests: copies, reductions, LDS transposes, all-reduces.

Each `_name()` function builds and compiles one kernel; pointers are untyped global memory.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch
from flydsl.expr import rocdl

from rocm_msa.flydsl_compile import Compiled, compile_flydsl
from tests.emulator.cases import Args, Case, Expected, PointerTable, Tolerance, normal, one_rank
from tests.emulator.kernels_mfma import MFMA_CASES

WAVE = 64
BLOCK = 256
COPY_ELEMENTS = 3000  # the last workgroup is not full
TILE = 64  # of the transpose through LDS
LDS_ROW = TILE + 1  # words: one more than the tile, so that columns lie in different banks
REDUCE_ELEMENTS = 4 * BLOCK
MESSAGE = 2 * BLOCK  # elements of an all-reduce
WAIT_TICKS = 100_000_000  # 1 s of the 100 MHz clock
GENERATION = 7


def pointer(dtype=fx.Float32, align: int = 16):
    """A null pointer: it specialises a kernel and cannot be launched."""
    return flyc.from_c_void_p(dtype, None, assumed_align=align)


def shared(dtype, count: int):
    """A pointer to `count` elements of static LDS; to be called while a kernel is traced."""
    return fx.SharedAllocator().allocate(fx.Array[dtype, count, 16]).peek().ptr


def realtime():
    """s_memrealtime: ticks of 100 MHz."""
    from flydsl._mlir.dialects import llvm

    return fx.Int64(llvm.call_intrinsic(fx.Int64.ir_type, "llvm.amdgcn.s.memrealtime", [], [], []))


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


# All-reduces between ranks


def _allreduce_words(ranks: int) -> Compiled:
    """Value and generation in one aligned 64-bit word: no fence is needed.

    Mailbox of each rank: [ranks, MESSAGE] 64-bit words, row s written by rank s alone. Each lane
    sends its element to all ranks, then waits for the same element of all and adds in rank order.
    """

    @flyc.kernel(name=f"allreduce_words_{ranks}")
    def kernel(
        source: fx.Pointer,
        target: fx.Pointer,
        mailboxes: fx.Pointer,
        status: fx.Pointer,
        rank: fx.Int32,
        generation: fx.Int32,
    ):
        i = fx.block_idx.x * BLOCK + fx.thread_idx.x
        place = fx.PointerType.get(fx.Int64.ir_type, fx.AddressSpace.Global, 8)
        tag = fx.Int64(generation) << 32
        word = tag | fx.Int64(fx.Uint32(source[i].bitcast(fx.Int32)))
        for peer in fx.range_constexpr(ranks):
            mailbox = fx.inttoptr(place, mailboxes[peer])
            # Writer: this rank. Reader: the peer. System scope, one word: value and tag together.
            fx.generic_store(
                mailbox + rank * MESSAGE + i, word, memory_order=fx.AtomicOrdering.Monotonic
            )
        own = fx.inttoptr(place, mailboxes[rank])
        total = fx.Float32(0.0)
        for sender in fx.range_constexpr(ranks):
            slot = own + sender * MESSAGE + i
            began = realtime()
            got = fx.generic_load(slot, memory_order=fx.AtomicOrdering.Monotonic)
            late = fx.Boolean(False)
            while ((got >> 32) != fx.Int64(generation)) & (late == False):  # noqa: E712
                rocdl.s_sleep(1)
                got = fx.generic_load(slot, memory_order=fx.AtomicOrdering.Monotonic)
                late = (realtime() - began) > WAIT_TICKS
            if late:
                status[0] = fx.Int32(sender + 1)
            total = total + fx.Int32(got).bitcast(fx.Float32)
        target[i] = total

    @flyc.jit
    def launch(
        source: fx.Pointer,
        target: fx.Pointer,
        mailboxes: fx.Pointer,
        status: fx.Pointer,
        rank: fx.Int32,
        generation: fx.Int32,
    ):
        kernel(source, target, mailboxes, status, rank, generation).launch(
            grid=(1, 1, 1), block=(BLOCK, 1, 1)
        )

    addresses, words = pointer(fx.Int64), pointer(fx.Int32)
    return compile_flydsl(launch, pointer(), pointer(), addresses, words, 0, 0)


def _allreduce_flags(ranks: int) -> Compiled:
    """Bulk data with a flag: every wave drains its stores, barrier, release, flag.

    Each rank publishes its own message and one flag a workgroup; every workgroup waits for the
    flags of its part from all ranks, acquires, and reads their messages.
    """

    @flyc.kernel(name=f"allreduce_flags_{ranks}")
    def kernel(
        source: fx.Pointer,
        target: fx.Pointer,
        messages: fx.Pointer,
        flags: fx.Pointer,
        rank: fx.Int32,
        generation: fx.Int32,
    ):
        group, lane = fx.block_idx.x, fx.thread_idx.x
        i = group * BLOCK + lane
        data = fx.PointerType.get(fx.Float32.ir_type, fx.AddressSpace.Global, 4)
        mark = fx.PointerType.get(fx.Int32.ir_type, fx.AddressSpace.Global, 4)
        fx.inttoptr(data, messages[rank])[i] = source[i]
        rocdl.s_waitcnt(vmcnt=0)
        fx.barrier()
        if lane == 0:
            # Writer: lane 0, for its workgroup, whose stores are all done. Readers: all ranks.
            fx.memory_fence(ordering=fx.AtomicOrdering.Release)
            flag = fx.inttoptr(mark, flags[rank]) + group
            fx.generic_store(flag, generation, memory_order=fx.AtomicOrdering.Monotonic)
        if lane < ranks:
            flag = fx.inttoptr(mark, flags[lane]) + group
            got = fx.generic_load(flag, memory_order=fx.AtomicOrdering.Monotonic)
            while got != generation:
                rocdl.s_sleep(1)
                got = fx.generic_load(flag, memory_order=fx.AtomicOrdering.Monotonic)
            fx.memory_fence(ordering=fx.AtomicOrdering.Acquire)
        fx.barrier()
        total = fx.Float32(0.0)
        for peer in fx.range_constexpr(ranks):
            total = total + fx.inttoptr(data, messages[peer])[i]
        target[i] = total

    @flyc.jit
    def launch(
        source: fx.Pointer,
        target: fx.Pointer,
        messages: fx.Pointer,
        flags: fx.Pointer,
        rank: fx.Int32,
        generation: fx.Int32,
    ):
        kernel(source, target, messages, flags, rank, generation).launch(
            grid=(1, 1, 1), block=(BLOCK, 1, 1)
        )

    addresses = pointer(fx.Int64)
    return compile_flydsl(launch, pointer(), pointer(), addresses, addresses, 0, 0)


def _words_args(ranks: int, seed: int) -> Args:
    mailboxes = tuple(torch.zeros(ranks, MESSAGE, dtype=torch.int64) for _ in range(ranks))
    table = PointerTable(mailboxes)
    return tuple(
        (
            normal((MESSAGE,), seed * 100 + rank),
            torch.zeros(MESSAGE),
            table,
            torch.zeros(1, dtype=torch.int32),
            rank,
            GENERATION,
        )
        for rank in range(ranks)
    )


def _flags_args(ranks: int, seed: int) -> Args:
    messages = PointerTable(tuple(torch.zeros(MESSAGE) for _ in range(ranks)))
    flags = PointerTable(
        tuple(torch.zeros(MESSAGE // BLOCK, dtype=torch.int32) for _ in range(ranks))
    )
    return tuple(
        (
            normal((MESSAGE,), seed * 100 + rank),
            torch.zeros(MESSAGE),
            messages,
            flags,
            rank,
            GENERATION,
        )
        for rank in range(ranks)
    )


def _expected_allreduce(args: Args) -> Expected:
    total = torch.zeros(MESSAGE)
    for rank_args in args:  # the kernels' order: bit for bit the same on all ranks
        total = total + rank_args[0]
    return tuple({1: total} for _ in args)


def _allreduce_cases(ranks: int) -> list[Case]:
    grid, block = (MESSAGE // BLOCK, 1, 1), (BLOCK, 1, 1)
    return [
        Case(
            f"flydsl_allreduce_words_{ranks}",
            lambda: _allreduce_words(ranks),
            lambda seed: _words_args(ranks, seed),
            grid,
            block,
            _expected_allreduce,
            ranks=ranks,
        ),
        Case(
            f"flydsl_allreduce_flags_{ranks}",
            lambda: _allreduce_flags(ranks),
            lambda seed: _flags_args(ranks, seed),
            grid,
            block,
            _expected_allreduce,
            ranks=ranks,
        ),
    ]


def _transpose_read_case(bits: int) -> Case:
    def make_args(seed: int) -> Args:
        source = torch.randint(-(2**31), 2**31 - 1, (WAVE * 2,), generator=_generator(seed))
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


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
    *(case for ranks in (4, 8) for case in _allreduce_cases(ranks)),
    *MFMA_CASES,
]

"""FlyDSL all-reduces between ranks for the emulator's tests, by mailbox words and by flags."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch
from flydsl.expr import rocdl

from rocm_msa.flydsl_compile import Compiled, compile_flydsl
from tests.emulator.cases import Args, Case, Expected, PointerTable, normal
from tests.emulator.kernels_flydsl import BLOCK, pointer

MESSAGE = 2 * BLOCK  # elements
WAIT_TICKS = 100_000_000  # 1 s of the 100 MHz clock
GENERATION = 7


def realtime():
    """s_memrealtime: ticks of 100 MHz."""
    from flydsl._mlir.dialects import llvm

    return fx.Int64(llvm.call_intrinsic(fx.Int64.ir_type, "llvm.amdgcn.s.memrealtime", [], [], []))


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


CASES = [case for ranks in (4, 8) for case in _allreduce_cases(ranks)]

"""Hand-offs between ranks and between the programs of a rank, in Triton: the code that polls.

README.md has the protocol and why these are enough; rocm_msa/device/mailbox.py has the same
hand-offs for gfx950. A program is one warp, so that it goes on or gives up as a whole. `end` is
this rank's end of a launch, a tuple:

    0 own       int64 pointer: this rank's mailbox; error words of all ranks lie at its start
    1 boxes     int64 pointer [ranks]: where all mailboxes lie
    2 error     int64 pointer: this rank's error word
    3 status    int64 pointer: the error word, for the host
    4 rank      int32
    5 gen       int64: the launch, from 1
    6 patience  int64: ticks of `now`

What differs between GPUs is in `_peek`, `_put`, `now`, `release` and `acquire`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_PUT_PTX = tl.constexpr("""{
.reg .pred p;
setp.ne.b32 p, $3, 0;
@p st.relaxed.sys.global.b64 [$1], $2;
mov.b32 $0, 0;
}""")
_FENCE_PTX = tl.constexpr("fence.acq_rel.gpu; mov.b32 $0, 0;")
_TIMER_PTX = tl.constexpr("mov.u64 $0, %globaltimer;")
_RELEASE_AMD = tl.constexpr("""s_waitcnt vmcnt(0)
buffer_wbl2 sc1
s_waitcnt vmcnt(0)
v_mov_b32 $0, 0""")
_ACQUIRE_AMD = tl.constexpr("""s_waitcnt vmcnt(0)
buffer_inv sc1
v_mov_b32 $0, 0""")
_TIMER_AMD = tl.constexpr("""s_memrealtime $0
s_waitcnt lgkmcnt(0)""")


@triton.jit
def _peek(place, wanted, AMD: tl.constexpr):
    """64-bit words, past every cache, whole; 0 where not wanted. Relaxed, system scope."""
    if AMD:  # sc0 sc1
        return tl.load(place, mask=wanted, other=0, cache_modifier=".cv")
    else:  # PTX: ld.volatile has the semantics of ld.relaxed.sys
        return tl.load(place, mask=wanted, other=0, volatile=True)


@triton.jit
def _put(place, word, wanted, AMD: tl.constexpr):
    """Store 64-bit words past every cache, whole. Relaxed, system scope."""
    if AMD:  # sc0 sc1
        tl.store(place, word, mask=wanted, cache_modifier=".wt")
    else:
        tl.inline_asm_elementwise(
            _PUT_PTX, "=r,l,l,r,~{memory}", [place.to(tl.int64), word, tl.where(wanted, 1, 0)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def now(AMD: tl.constexpr):
    """Ticks: of 10 ns on AMD, of 1 ns on NVIDIA."""
    if AMD:
        return tl.inline_asm_elementwise(
            _TIMER_AMD, "=s,~{memory}", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _TIMER_PTX, "=l,~{memory}", [], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def release(AMD: tl.constexpr):
    """What this program stored is visible on this GPU before what it stores from here on."""
    if AMD:
        tl.inline_asm_elementwise(
            _RELEASE_AMD, "=v,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.inline_asm_elementwise(
            _FENCE_PTX, "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()  # then one lane may store the flag for all


@triton.jit
def acquire(AMD: tl.constexpr):
    """What others released before words that this program has read is seen from here on."""
    tl.debug_barrier()
    if AMD:
        tl.inline_asm_elementwise(
            _ACQUIRE_AMD, "=v,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.inline_asm_elementwise(
            _FENCE_PTX, "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def mailboxes(end, RANKS: tl.constexpr, R: tl.constexpr):
    """int64 pointers `[R]` to all mailboxes, the own one beyond RANKS."""
    peer = tl.arange(0, R)
    address = tl.load(end[1] + tl.where(peer < RANKS, peer, end[4]))
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def post(end, place, payload, wanted, AMD: tl.constexpr):
    """Store tagged words; payload: 32 bits.

    Writer: this program. Readers: programs of the rank whose mailbox it is. System scope; payload
    and tag are one word, so nothing else need be ordered with it.
    """
    word = (_tag(end) << 32) | (payload.to(tl.int64) & 0xFFFFFFFF)
    _put(place, word, wanted, AMD)


@triton.jit
def clear(place, AMD: tl.constexpr):
    """Make tagged words nobody's."""
    _put(place, place.to(tl.int64) * 0, place.to(tl.int64) != 0, AMD)


@triton.jit
def _tag(end):
    """The launch's tag as the signed upper half of a word; never 0."""
    return (end[5] & 0x7FFFFFFF) - 0x80000000


@triton.jit
def _look(place, wanted, peer, want, SHIFT: tl.constexpr, AMD: tl.constexpr):
    """(words, a rank that did not write a wanted one or -1)."""
    word = _peek(place, wanted, AMD)
    absent = wanted & ((word >> SHIFT) != want)
    return word, tl.max(tl.where(absent, peer, -1))


@triton.jit
def _await(
    end, place, wanted, peer, want, site, times, SHIFT: tl.constexpr, RANKS: tl.constexpr,
    R: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """Wait until the wanted words have `want` above their low SHIFT bits: (words, whether so)."""
    word, lacking = _look(place, wanted, peer, want, SHIFT, AMD)
    began = now(AMD)
    over = lacking < 0
    while over == 0:
        word, lacking = _look(place, wanted, peer, want, SHIFT, AMD)
        late = now(AMD) - began > end[6] * times
        over = (lacking < 0) | late | hear(end, RANKS, R, AMD)
    if lacking >= 0:
        fail(end, site, lacking, RANKS, R, AMD)
    return word, lacking < 0


@triton.jit
def collect(
    end, place, wanted, peer, site, times, RANKS: tl.constexpr, R: tl.constexpr, AMD: tl.constexpr
):
    """Wait until the words at `place` have this launch's tag.

    Args:
        place, wanted, peer: tensors of one shape; peer: who writes the word.
        site: for the error word. times: bound, in units of patience.

    Returns:
        payloads as int64 0..2^32 - 1, valid where wanted; whether all are there.
    """
    word, there = _await(end, place, wanted, peer, _tag(end), site, times, 32, RANKS, R, AMD)
    return word & 0xFFFFFFFF, there


@triton.jit
def raise_flag(end, flag, AMD: tl.constexpr):
    """Publish what this program has stored, unless the rank has an error.

    Readers: programs of this rank that saw the flag.
    """
    release(AMD)
    if _peek(end[2], True, AMD) == 0:
        _put(flag, end[5], True, AMD)


@triton.jit
def await_flags(
    end, flags, first, last, site, times, RANKS: tl.constexpr, R: tl.constexpr, AMD: tl.constexpr
):
    """Wait for the flags of programs first .. last; whether all are there.

    What these programs stored may then be loaded.
    """
    at, there = first, first == first
    while (at <= last) & there:
        mine = at + tl.arange(0, 64)
        peer = tl.zeros((64,), tl.int32) + end[4]
        _, there = _await(
            end, flags + mine, mine <= last, peer, end[5], site, times, 0, RANKS, R, AMD
        )
        at += 64
    acquire(AMD)
    return there


@triton.jit
def hear(end, RANKS: tl.constexpr, R: tl.constexpr, AMD: tl.constexpr):
    """Whether this rank has an error or a peer has sent one."""
    mine = _peek(end[2], True, AMD)
    return (_reported(end, RANKS, R, AMD) | mine) != 0


@triton.jit
def _reported(end, RANKS: tl.constexpr, R: tl.constexpr, AMD: tl.constexpr):
    """An error word that a rank has sent, 0 for none."""
    peer = tl.arange(0, R)
    return tl.max(_peek(end[0] + peer, peer < RANKS, AMD))


@triton.jit
def fail(end, site, peer, RANKS: tl.constexpr, R: tl.constexpr, AMD: tl.constexpr):
    """Record an error, unless this rank has one, and tell the host and all ranks.

    Where a peer has reported one, that is recorded instead.
    """
    wide = tl.full((), 0, tl.int64)
    word = ((wide + site) << 56) | ((wide + peer) << 48) | ((wide + end[4]) << 40) | (1 << 32)
    word = word | (end[5] & 0xFFFFFFFF)
    told = _reported(end, RANKS, R, AMD)
    word = tl.where(told != 0, told, word)
    # Readers: programs of this rank, at the GPU's scope. The first stays.
    before = tl.atomic_cas(end[2], wide, word, sem="relaxed", scope="gpu")
    if before == 0:
        _put(end[3], word, True, AMD)
        # Writer: this rank alone. Readers: all waits of all ranks. One word: no fence.
        _put(mailboxes(end, RANKS, R) + end[4], word, tl.arange(0, R) < RANKS, AMD)


@triton.jit
def hear_first(end, RANKS: tl.constexpr, R: tl.constexpr, AMD: tl.constexpr):
    """As `hear`, and then a peer's error is this rank's too."""
    heard = hear(end, RANKS, R, AMD)
    if heard:
        fail(end, 0, 0, RANKS, R, AMD)
    return heard


@triton.jit
def arrive(end, arrivals, generation):
    """The end of a program's part: the last one of the launch advances the generation.

    arrivals: int32 pointer, 0 between launches. generation: int64 pointer.
    """
    tl.debug_barrier()
    before = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        # All programs have read the generation. Reader: the next launch.
        tl.store(arrivals, 0)
        tl.store(generation, end[5] + 1)

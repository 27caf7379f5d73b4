"""Hand-offs between the ranks of a group, and between workgroups of a rank: the code that polls.

    tagged words    payload and tag of the launch in one 64-bit word of any rank's mailbox: no fence
    bulk data       plain stores, then a flag; for waves of the same rank
    errors          the first stays; all waits of all ranks end on it
    generation      read when a launch begins, advanced by its last workgroup

Every wait is bounded and says whether what it waited for is there: as a scalar, so that a wave goes
on or gives up as a whole. The protocol, and why these hand-offs are enough: dcp/README.md.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import llvm
from flydsl.expr import rocdl

from rocm_msa.device.memory import Bytes, global_address, global_bytes
from rocm_msa.device.wave import lane_id, lane_value, uniform

WORD = 8  # bytes of a tagged word, a flag, an error word
_TAG_BIT = -(1 << 31)
_SYSTEM, _AGENT = None, "agent"
TICKS_A_MS = 100_000  # of s_memrealtime
MORE_TIMES = 8
_SLEEP = 1  # 64 cycles
_SET_BIT = 32  # of an error word


# `end` is one rank's end of a launch: a namespace, best `wave.Scalars`, with
#     ranks     int, of the group           rank      Int32, this one
#     places    namespace of ints: offsets of `generation`, `error`, `arrivals` in the state
#     addresses Int64 of int64 [ranks + 1]: all ranks' mailboxes, with the errors at their start,
#               then 8 bytes that the host reads, for the error word
#     own       Int64, this rank's mailbox  state     Int64, this rank's own memory
#     tag       Int32, of the launch        patience  Int32, ms: waits take multiples of it at most


def tag_of(launch: fx.Int64) -> fx.Int32:
    """The tag of launch `launch`: never 0."""
    return fx.Int32(launch) | fx.Int32(_TAG_BIT)


def own_mailbox(addresses: fx.Pointer, rank: fx.Int32) -> fx.Int64:
    """Address of this rank's mailbox."""
    return global_bytes(addresses).uniform(fx.Int64, offset=fx.Int64(rank) * WORD)


def generation(state: fx.Int64, offset: int) -> fx.Int64:
    """The launch's number, in scalar registers.

    Writer: the launch before; in this one, its last workgroup, when all others are through.
    """
    return in_scalars(generation_word(state, offset))


def generation_word(state: fx.Int64, offset: int) -> fx.Int64:
    """The same, loaded and not waited for: to be given to `in_scalars` when it is needed."""
    return _load(global_address(state).at(offset), _AGENT)


def mailbox_of(end, peer) -> Bytes:
    """The mailbox of a rank that may differ by lane; of `ranks`: the host's word.

    Of an int, its address comes by a scalar load, which waits for no store that is under way.
    """
    if isinstance(peer, int):
        addresses = global_address(end.addresses)
        return global_address(addresses.uniform(fx.Int64, offset=peer * WORD))
    peer = fx.Int32(peer)
    return global_address(
        global_address(end.addresses).load(fx.Int64, offset=fx.Int64(peer) * WORD)
    )


def post(end, place: Bytes, payload) -> None:
    """Store a tagged word; payload: 32 bits.

    Writer: this lane. Reader: waves of the rank whose mailbox it is. System scope; payload and tag
    are one word, so nothing else need be ordered with it.
    """
    high = fx.Int64(end.tag) << 32
    _store(place, high | fx.Int64(fx.Uint32(payload)), _SYSTEM)


def clear(place: Bytes) -> None:
    """Make a tagged word nobody's."""
    _store(place, fx.Int64(0), _SYSTEM)


@flyc.jit
def collect(end, places, wanted, peers, site, times):
    """Wait until the words at `places` have this launch's tag.

    Args:
        places: of each lane, a list; all lanes of the wave take part.
        wanted: a Boolean of each lane for each place; other places are not looked at.
        peers: Int32 of each lane for each place: who writes it.
        site: for the error word. times: bound, in units of `end.patience`; MORE_TIMES longer while
            more than one peer is missing: one may itself wait for the other, and knows more.

    Returns:
        payloads, a list of Uint32, valid where wanted; whether all are there.
    """
    payload, least, most = _look(end, places, wanted, peers)
    there = _nobody(least >= 0)
    over = there
    peer, began = fx.Int32(0), _now()
    while over == False:  # noqa: E712
        rocdl.s_sleep(_SLEEP)
        payload, least, most = _look(end, places, wanted, peers)
        lacking = least >= 0
        there = _nobody(lacking)
        lanes = fx.Uint64(rocdl.ballot(fx.Int64.ir_type, lacking.ir_value()))
        peer = _lane(least, fx.Int32(fx.cttz(lanes)) & 63)
        alone = _nobody(lacking & ((least != peer) | (most != peer)))
        waited = _now() - began
        late = waited > alone.select(_bound(end, times), _bound(end, times + MORE_TIMES))
        over = there | late | _heard(end)
    if there == False:  # noqa: E712
        fail(end, site, peer)
    return [payload[i] for i in range(len(places))], there


def error_words(end) -> fx.Int64:
    """In lane p this rank's error word and the one that rank p has sent, as one: 0 for none."""
    return _reported(end) | _load(_state(end, end.places.error), _AGENT)


@flyc.jit
def hear(end, words):
    """Whether this rank or a peer has an error, which then is this rank's too; words: of
    `error_words`."""
    heard = _nobody(words != 0) == False  # noqa: E712
    if heard:
        fail(end, 0, fx.Int32(0))
    return heard


@flyc.jit
def fail(end, site, peer):
    """Record an error, unless this rank has one, and tell the host and all ranks.

    Where a peer has reported one, that is recorded instead. All lanes of the wave take part.
    """
    lane, rank = lane_id(), end.rank
    word = fx.Int64((fx.Int32(site) << 24) | (peer << 16) | (rank << 8) | 1) << _SET_BIT
    word = word | fx.Int64(fx.Uint32(fx.Int32(_launch(end))))
    told = _reported(end)
    reports = fx.Uint64(rocdl.ballot(fx.Int64.ir_type, (told != 0).ir_value()))
    known = _lane64(told, fx.Int32(fx.cttz(reports)) & 63)
    word = (reports != fx.Uint64(0)).select(known, word)
    won = fx.Int32(0)
    if lane == 0:
        # Readers: waves of this rank, at agent scope. The first stays.
        place = _state(end, end.places.error).pointer
        _, stored = fx.atomic_cas(place, fx.Int64(0), word, syncscope=_AGENT)
        won = stored.select(fx.Int32(1), fx.Int32(0))
        if stored:
            _store(mailbox_of(end, end.ranks), word, _SYSTEM)  # reader: the host
    won = uniform(won)
    if (won != 0) & (lane < end.ranks):
        # Writer: this rank alone. Readers: all waits of rank `lane`. One word: no fence.
        _store(mailbox_of(end, lane).at(rank * WORD), word, _SYSTEM)


def raise_flag(end, flag: Bytes) -> None:
    """Publish what all waves of this workgroup have stored, unless the rank has an error.

    Writers: all waves, by plain stores; each waits for its own. Readers: waves of this rank that
    saw the flag, on any XCD: agent scope. To be called by all waves.
    """
    rocdl.s_waitcnt(vmcnt=0)
    fx.barrier()
    _publish(end, flag)


@flyc.jit
def _publish(end, flag):
    # A wave that gave up has recorded why before the barrier.
    well = _load(_state(end, end.places.error), _AGENT) == 0
    if well & (fx.thread_idx.x == 0):
        fx.memory_fence(ordering=fx.AtomicOrdering.Release, syncscope=_AGENT)
        _store(flag, _launch(end), _AGENT)


@flyc.jit
def await_flags(end, flags, first, last, site, times):
    """Wait for the flags of workgroups first .. last; whether all are there.

    What these workgroups stored may then be loaded, by plain loads.
    """
    lane, launch = lane_id(), _launch(end)
    there = fx.Boolean(True)
    began = _now()
    at = first
    over = at > last
    while over == False:  # noqa: E712
        mine = at + lane
        wanted = mine <= last
        place = flags.at(fx.Int64(wanted.select(mine, at)) * WORD)
        missing = wanted & (_load(place, _AGENT) != launch)
        ready = _nobody(missing)
        late = (_now() - began) > _bound(end, times)
        there = ready | ((late | _heard(end)) == False)  # noqa: E712
        at = ready.select(at + 64, at)
        over = (at > last) | (there == False)  # noqa: E712
        if ready == False:  # noqa: E712
            rocdl.s_sleep(_SLEEP)
    if there == False:  # noqa: E712
        fail(end, site, end.rank)
    fx.memory_fence(ordering=fx.AtomicOrdering.Acquire, syncscope=_AGENT)
    return there


@flyc.jit
def arrive(end, workgroups):
    """The end of a workgroup's part: the last one of the launch advances the generation.

    To be called by all waves, after their last wait.
    """
    # What this wave sent is out before it rests: the waves that it rests for may wait for it.
    rocdl.s_waitcnt(vmcnt=0)
    fx.barrier()
    if fx.thread_idx.x == 0:
        arrivals = _state(end, end.places.arrivals)
        before = fx.atomic_add(arrivals.pointer, fx.Int32(1), syncscope=_AGENT)
        if before == workgroups - 1:
            # All workgroups have read the generation. Reader: the next launch.
            _store(arrivals, fx.Int32(0), _AGENT)
            _store(_state(end, end.places.generation), _launch(end) + 1, _AGENT)


def _launch(end) -> fx.Int64:
    return generation(end.state, end.places.generation)


def _state(end, offset: int) -> Bytes:
    return global_address(end.state).at(offset)


def _look(end, places, wanted, peers):
    """(payloads as one vector; in each lane the lowest and the highest number of the peers that did
    not write a word that it wants, or -1)."""
    found = [_load(place, _SYSTEM) for place in places]
    least, most = fx.Int32(-1), fx.Int32(-1)
    for word, want, peer in zip(found, wanted, peers, strict=True):
        absent = want & (fx.Int32(word >> 32) != end.tag)
        lower = (least < 0).select(peer, fx.min(least, peer))
        least = absent.select(lower, least)
        most = absent.select(fx.max(most, peer), most)
    payload = [fx.Uint32(fx.Int32(word)) for word in found]
    return fx.Vector.from_elements(payload, fx.Uint32), least, most


def _reported(end) -> fx.Int64:
    """In lane p the error word that rank p has sent, 0 beyond."""
    lane = lane_id()
    peer = (lane < end.ranks).select(lane, fx.Int32(0))
    word = _load(global_address(end.own).at(fx.Int64(peer) * WORD), _SYSTEM)
    return (lane < end.ranks).select(word, fx.Int64(0))


def _heard(end) -> fx.Boolean:
    """Whether this rank has an error or a peer has sent one."""
    return _nobody(error_words(end) != 0) == False  # noqa: E712


def _nobody(condition: fx.Boolean) -> fx.Boolean:
    """Whether a condition holds in no lane, as a scalar."""
    return fx.Int64(rocdl.ballot(fx.Int64.ir_type, condition.ir_value())) == 0


def _bound(end, times: int) -> fx.Int64:
    """Ticks of a wait."""
    return fx.Int64(end.patience) * (TICKS_A_MS * times)


def _now() -> fx.Int64:
    """Ticks of 100 MHz (s_memrealtime)."""
    return fx.Int64(llvm.call_intrinsic(fx.Int64.ir_type, "llvm.amdgcn.s.memrealtime", [], [], []))


def _lane(value: fx.Int32, lane: fx.Int32) -> fx.Int32:
    """The value of one lane, the same `lane` in all."""
    return lane_value(value, uniform(lane))


def _lane64(value: fx.Int64, lane: fx.Int32) -> fx.Int64:
    low, high = _lane(fx.Int32(value), lane), _lane(fx.Int32(value >> 32), lane)
    return (fx.Int64(high) << 32) | fx.Int64(fx.Uint32(low))


def in_scalars(value: fx.Int64) -> fx.Int64:
    """The first active lane's value in scalar registers."""
    low, high = uniform(fx.Int32(value)), uniform(fx.Int32(value >> 32))
    return (fx.Int64(high) << 32) | fx.Int64(fx.Uint32(low))


def _load(place: Bytes, scope) -> fx.Int64:
    order = llvm.AtomicOrdering.monotonic
    kind = fx.Int64.ir_type
    found = llvm.LoadOp(kind, place.pointer, alignment=WORD, ordering=order, syncscope=scope)
    return fx.Int64(found.result)


def _store(place: Bytes, value, scope) -> None:
    order, size = llvm.AtomicOrdering.monotonic, value.dtype.width // 8
    llvm.StoreOp(
        value.ir_value(), place.pointer, alignment=size, ordering=order, syncscope=scope
    )  # fmt: skip

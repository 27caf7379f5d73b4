"""Launching kernels on the emulated device.

    report = launch(code, "softmax", grid=(8,), block=(256,), args=[out, x, 1024])

Buffers (NumPy arrays, torch CPU tensors) are used in place: an emulated address is the address in
this process. Only what was passed as an argument, or as `buffers`, can be accessed; anything else
is a finding, and a read gives 0. The grid counts workgroups.
"""

from __future__ import annotations

import ctypes
import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gfx950_emu import report as rep
from gfx950_emu.build import core
from gfx950_emu.decode import PIPES, decode, opcodes
from gfx950_emu.report import LaunchReport, Report

USER_ENABLE = {
    "private_segment_buffer": 1,
    "dispatch_ptr": 2,
    "queue_ptr": 4,
    "kernarg_segment_ptr": 8,
    "dispatch_id": 16,
    "flat_scratch_init": 32,
    "private_segment_size": 64,
}
ANY = 0xFFFFFFFF
READ, WRITE = 1, 2


class Checks(enum.IntFlag):
    WAIT = 1
    DEFER = 2
    LDS_RACE = 4
    BOUNDS = 8
    UNINIT = 16
    ALIGN = 32
    BARRIER = 64
    SCOPE = 128
    ALL = 255
    NONE = 0


@dataclass(frozen=True)
class DeviceModel:
    xcds: int = 8
    cus_per_xcd: int = 32
    lds_bytes: int = 160 * 1024
    waves_per_simd: int = 8
    vgprs_per_simd: int = 512
    simds: int = 4
    max_workgroups: int = 32  # on a CU
    sgprs: int = 800


@dataclass(frozen=True)
class Schedule:
    """Which wave runs next and for how long; the same seed gives the same run.

    round_robin: in turn. random: any. priority: waves with random priorities that change when a
    wave polls, s_setprio first. starve: random, but the waves named by rank, workgroup and wave
    (None: any) run only when all others poll, or by a chance of 1 in 4096.
    """

    kind: str = "round_robin"
    seed: int = 0
    quantum: tuple[int, int] = (64, 64)  # wave-instructions, least and most, log-uniform
    starve: tuple[int | None, int | None, int | None] = (None, None, None)
    max_instructions: int = 2_000_000_000
    spin_rounds: int = 20_000  # polling instructions a wave before nobody makes progress

    KINDS = ("round_robin", "random", "priority", "starve")

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise ValueError(f"schedule {self.kind!r}: expected one of {self.KINDS}")


class _Device(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint32) for n in DeviceModel.__dataclass_fields__]


class _Schedule(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_uint32) for n in ("kind", "rank", "workgroup", "wave")),
        *(
            (n, ctypes.c_uint64)
            for n in ("seed", "qmin", "qmax", "max_instructions", "spin_rounds")
        ),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernarg", ctypes.c_uint64),
        ("dispatch_packet", ctypes.c_uint64),
        *((n, ctypes.c_uint32) for n in
          ("code", "rank", "entry", "lds_bytes", "scratch_bytes", "vgprs", "sgprs",
           "accum_offset")),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        *((n, ctypes.c_uint32) for n in
          ("mode", "preload_length", "preload_offset", "user_sgprs_used", "workitem_dims",
           "user_sgpr_count", "wg_id_mask", "private_segment", "priority", "start_after",
           "user_enable", "delay_rounds", "pad")),
    ]  # fmt: skip


def _three(value: int | Sequence[int]) -> tuple[int, int, int]:
    values = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    if not 1 <= len(values) <= 3 or min(values) < 1:
        raise ValueError(f"a grid or block of 1 to 3 positive numbers, not {value}")
    return (*values, 1, 1)[:3]


def buffer_span(value) -> tuple[int, int, int] | None:
    """(address, bytes, permissions) of an array or tensor; None for anything else."""
    if isinstance(value, np.ndarray):
        low, high = (
            np.lib.array_utils.byte_bounds(value) if value.size else (value.ctypes.data,) * 2
        )
        return low, high - low, READ | (WRITE if value.flags.writeable else 0)
    if hasattr(value, "data_ptr"):
        if value.device.type != "cpu":
            raise ValueError(f"a tensor on {value.device}: the emulator needs CPU tensors")
        size = value.element_size()
        if value.numel() == 0:
            return value.data_ptr(), 0, READ | WRITE
        last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        return value.data_ptr(), (last + 1) * size, READ | WRITE
    return None


def pack_argument(value, size: int, name: str) -> bytes:
    span = buffer_span(value)
    if span:
        start = value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr()
        if size != 8:
            raise TypeError(f"argument {name}: a buffer for a parameter of {size} bytes")
        return struct.pack("<Q", start)
    if value is None:
        return bytes(size)
    if isinstance(value, (bytes, bytearray)):
        if len(value) > size:
            raise TypeError(f"argument {name}: {len(value)} bytes for a parameter of {size}")
        return bytes(value).ljust(size, b"\0")
    if isinstance(value, np.generic):
        return value.tobytes().ljust(size, b"\0")
    if isinstance(value, float):
        code = {2: "<e", 4: "<f", 8: "<d"}.get(size)
        if code is None:
            raise TypeError(f"argument {name}: a float for a parameter of {size} bytes")
        return struct.pack(code, value)
    if isinstance(value, (bool, int)):
        if not -(1 << (8 * size - 1)) <= value < 1 << 8 * size:
            raise ValueError(f"argument {name}: {value} does not fit {size} bytes")
        return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    raise TypeError(f"argument {name}: cannot pass {type(value).__name__}")


def pack_kernarg(kernel, args, grid, block, packet_address: int = 0) -> np.ndarray:
    """The kernel's argument block; trailing pointers that are not given are null."""
    length = max(
        kernel.descriptor.kernarg_bytes, max((a.offset + a.size for a in kernel.args), default=0)
    )
    block_bytes = np.zeros(max(length, 16) + 256, np.uint8)
    hidden = {}
    for axis, letter in enumerate("xyz"):
        hidden[f"hidden_block_count_{letter}"] = grid[axis]
        hidden[f"hidden_group_size_{letter}"] = block[axis]
    hidden["hidden_grid_dims"] = 3 if grid[2] > 1 else 2 if grid[1] > 1 else 1
    explicit = [a for a in kernel.args if not a.kind.startswith("hidden_")]
    if len(args) > len(explicit):
        raise TypeError(f"kernel {kernel.name} takes {len(explicit)} arguments, {len(args)} given")
    for a in explicit[len(args) :]:
        if a.kind != "global_buffer":
            raise TypeError(f"kernel {kernel.name}: argument {a.name or a.offset} is missing")
    for a, value in zip(explicit, args, strict=False):
        data = pack_argument(value, a.size, a.name or f"at {a.offset}")
        block_bytes[a.offset : a.offset + a.size] = np.frombuffer(data, np.uint8)
    for a in kernel.args:
        if a.kind in hidden:
            data = int(hidden[a.kind]).to_bytes(a.size, "little")
            block_bytes[a.offset : a.offset + a.size] = np.frombuffer(data, np.uint8)
    return block_bytes


_DECODED: dict[tuple[str, str], np.ndarray] = {}


def decoded(code_object, kernel) -> np.ndarray:
    key = (code_object.digest, kernel.name)
    if key not in _DECODED:
        _DECODED[key] = decode(kernel.instructions, kernel.descriptor.accum_offset, kernel.name)
    return _DECODED[key]


def loaded_image(code_object) -> tuple[np.ndarray, int]:
    """The code object's memory, and the address of its byte 0 there."""
    end = max((s.address + len(s.data) for s in code_object.segments), default=0)
    raw = np.zeros(end + 4096, np.uint8)
    shift = -raw.ctypes.data % 4096
    image = raw[shift : shift + end]
    for s in code_object.segments:
        image[s.address : s.address + len(s.data)] = np.frombuffer(s.data, np.uint8)
    return image, image.ctypes.data


@dataclass
class _Queued:
    code_object: object
    kernel: object
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: list
    lds_bytes: int
    rank: int
    stream: int
    delay: int
    buffers: list = field(default_factory=list)


class Machine:
    """A device, or several ranks of it in one address space, with a queue of launches.

    Launches of one rank and stream run one after another, all others at once. run() runs the
    queue and keeps it, so that a second run() replays it, as a graph does.
    """

    def __init__(self, device: DeviceModel | None = None, schedule: Schedule | None = None,
                 checks: Checks = Checks.ALL) -> None:  # fmt: skip
        self.device = device or DeviceModel()
        self.schedule = schedule or Schedule()
        self.checks = checks
        self.queue: list[_Queued] = []
        self.killed: set[int] = set()

    def launch(self, code_object, kernel, grid, block, args, *, lds_bytes=0, rank=0, stream=0,
               delay=0, buffers=()) -> int:  # fmt: skip
        """Queue a launch. `delay`: scheduling quanta to hold it back. `buffers`: memory that is
        reached only through pointers in memory. Returns its number."""
        k = code_object.kernels[kernel] if isinstance(kernel, str) else kernel
        grid, block = _three(grid), _three(block)
        threads = block[0] * block[1] * block[2]
        if threads > k.max_workgroup_size:
            raise ValueError(
                f"kernel {k.name}: a block of {threads} threads, compiled for at most "
                f"{k.max_workgroup_size}"
            )
        lds = k.descriptor.lds_bytes + lds_bytes
        if lds > self.device.lds_bytes:
            raise ValueError(
                f"kernel {k.name}: {lds} bytes of LDS, a CU has {self.device.lds_bytes}"
            )
        self.queue.append(
            _Queued(
                code_object, k, grid, block, list(args), lds, rank, stream, delay, list(buffers)
            )
        )
        return len(self.queue) - 1

    def kill_rank(self, rank: int) -> None:
        """Fault injection: the rank's launches never start."""
        self.killed.add(rank)

    def run(self) -> Report:
        return _Run(self).run()


class _Run:
    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.c = core()
        for which, struct_ in enumerate((None, _Launch, rep.FindingStruct, rep.CounterStruct,
                                         _Device, _Schedule)):  # fmt: skip
            if struct_ is not None:
                assert ctypes.sizeof(struct_) == self.c.emu_sizes(which), struct_
        self.keep: list = []  # memory that must outlive the run
        self.spans: list[tuple[int, int, int]] = []
        self.codes: dict[tuple[str, str], tuple[int, np.ndarray]] = {}
        self.images: dict[str, int] = {}

    def add_memory(self, array: np.ndarray, permissions: int) -> int:
        self.keep.append(array)
        self.spans.append((array.ctypes.data, array.nbytes, permissions))
        return array.ctypes.data

    def add_regions(self, handle) -> None:
        merged: list[list[int]] = []
        for base, size, permissions in sorted(s for s in self.spans if s[1]):
            if merged and base < merged[-1][0] + merged[-1][1]:
                last = merged[-1]
                last[1] = max(last[1], base + size - last[0])
                last[2] |= permissions
            else:
                merged.append([base, size, permissions])
        for n, (base, size, permissions) in enumerate(merged):
            self.c.emu_add_region(handle, base, size, permissions, n)

    def code(self, handle, q: _Queued) -> tuple[int, np.ndarray]:
        key = (q.code_object.digest, q.kernel.name)
        if key not in self.codes:
            insts = decoded(q.code_object, q.kernel)
            if q.code_object.digest not in self.images:
                image, base = loaded_image(q.code_object)
                self.add_memory(image, READ)
                self.images[q.code_object.digest] = base
            text = self.images[q.code_object.digest] + q.code_object.text_address
            number = self.c.emu_add_code(handle, insts.ctypes.data, len(insts), text)
            self.codes[key] = (number, insts)
        return self.codes[key]

    def prepare(self, handle, n: int, q: _Queued, after: int) -> _Launch:
        k, d = q.kernel, q.kernel.descriptor
        for value in (*q.args, *q.buffers):
            span = buffer_span(value)
            if span:
                self.spans.append(span)
        number, insts = self.code(handle, q)
        kernarg = pack_kernarg(k, q.args, q.grid, q.block)
        packet = np.zeros(64, np.uint8)
        struct.pack_into("<HHHHHHIIIIIQQ", packet.data, 0, 0, 3, *q.block, 0,
                         *(g * b for g, b in zip(q.grid, q.block, strict=True)),
                         d.scratch_bytes, q.lds_bytes, 0, 0)  # fmt: skip
        entry = int(np.searchsorted(insts["pc"], k.entry))
        assert insts["pc"][entry] == k.entry
        mode = d.float_mode.bits | d.dx10_clamp << 8 | d.ieee << 9 | d.fp16_ovfl << 23
        enable = sum(USER_ENABLE.get(name, 0) for name, _ in d.user_sgprs)
        ids = d.workgroup_id_x | d.workgroup_id_y << 1 | d.workgroup_id_z << 2
        kernarg_address = self.add_memory(kernarg, READ)
        return _Launch(
            kernarg=kernarg_address,
            dispatch_packet=self.add_memory(packet, READ),
            code=number,
            rank=q.rank,
            entry=entry,
            lds_bytes=q.lds_bytes,
            scratch_bytes=d.scratch_bytes,
            vgprs=d.vgprs,
            sgprs=d.sgprs,
            accum_offset=d.accum_offset,
            grid=q.grid,
            block=q.block,
            mode=mode,
            preload_length=d.preload_length,
            preload_offset=d.preload_offset,
            workitem_dims=d.workitem_id_dims,
            user_sgpr_count=d.user_sgpr_count,
            wg_id_mask=ids | d.workgroup_info << 3,
            private_segment=0,
            priority=d.priority,
            start_after=after,
            user_enable=enable,
            delay_rounds=ANY if q.rank in self.m.killed else q.delay,
        )

    def run(self) -> Report:
        m, s = self.m, self.m.schedule
        device = _Device(*(getattr(m.device, n) for n in DeviceModel.__dataclass_fields__))
        schedule = _Schedule(
            Schedule.KINDS.index(s.kind),
            *(ANY if v is None else v for v in s.starve),
            s.seed,
            *s.quantum,
            s.max_instructions,
            s.spin_rounds,
        )
        handle = self.c.emu_create(ctypes.byref(device), ctypes.byref(schedule), int(m.checks))
        try:
            last: dict[tuple[int, int], int] = {}
            structs = []
            for n, q in enumerate(m.queue):
                structs.append(self.prepare(handle, n, q, last.get((q.rank, q.stream), 0)))
                last[q.rank, q.stream] = n + 1
            self.add_regions(handle)
            for struct_ in structs:
                self.c.emu_add_launch(handle, ctypes.byref(struct_))
            status = self.c.emu_run(handle)
            return self.report(handle, status)
        finally:
            self.c.emu_destroy(handle)

    def report(self, handle, status: int) -> Report:
        count = self.c.emu_finding_count(handle)
        raw = (rep.FindingStruct * count)()
        if count:
            self.c.emu_findings(handle, raw)
        findings = [self.finding(f) for f in raw]
        launches = [self.launch_report(handle, n, q) for n, q in enumerate(self.m.queue)]
        return Report(
            rep.STATUS[status],
            tuple(findings),
            tuple(launches),
            self.c.emu_executed(handle),
            self.c.emu_clock(handle),
        )

    def finding(self, f) -> rep.Finding:
        k = self.m.queue[f.launch].kernel
        i = k.instructions[f.pc_index]
        return rep.Finding(
            rep.FINDINGS[f.kind], k.name, i.pc, i.text, k.line(i.pc), f.rank, f.workgroup, f.wave,
            f.lane, f.addr, rep.detail_of(f.kind, f.addr, f.aux), f.count,
        )  # fmt: skip

    def launch_report(self, handle, n: int, q: _Queued) -> LaunchReport:
        _, insts = self.codes[q.code_object.digest, q.kernel.name]
        counts = np.zeros(len(insts), np.uint64)
        self.c.emu_counts(handle, n, counts.ctypes.data)
        totals = np.bincount(insts["op"], weights=counts, minlength=len(opcodes())).astype(np.int64)
        by_name, pipes, mfma = {}, {}, {}
        for info in opcodes().values():
            hits = int(totals[info.number])
            if not hits:
                continue
            by_name[info.name] = hits
            pipe = PIPES[info.family]
            pipes[pipe] = pipes.get(pipe, 0) + hits
            if pipe == "mfma":
                mfma[info.name] = hits * info.extra * 2
        raw = rep.CounterStruct()
        self.c.emu_counters(handle, n, ctypes.byref(raw))
        counters = {name: getattr(raw, name) for name in rep.COUNTER_NAMES}
        dev, d = self.m.device, q.kernel.descriptor
        waves = -(-q.block[0] * q.block[1] * q.block[2] // 64)
        occupancy = min(dev.waves_per_simd, dev.vgprs_per_simd // max(d.vgprs, 1))
        if q.lds_bytes:
            groups = dev.lds_bytes // q.lds_bytes
            occupancy = min(occupancy, max(1, -(-groups * waves // dev.simds)))
        return LaunchReport(q.kernel.name, q.rank, by_name, pipes, mfma, counters, occupancy)


def launch(code_object, kernel, grid, block, args, *, lds_bytes=0, ranks=1, device=None,
           schedule=None, checks=Checks.ALL, buffers=()) -> Report:  # fmt: skip
    """Run one kernel to its end, on `ranks` ranks at once.

    `args`: a list for all ranks, or a list of `ranks` lists. lds_bytes comes on top of what the
    code object declares (Triton's shared memory).
    """
    machine = Machine(device, schedule, checks)
    each = ranks > 1 and len(args) == ranks and all(isinstance(a, (list, tuple)) for a in args)
    for rank in range(ranks):
        machine.launch(code_object, kernel, grid, block, args[rank] if each else args,
                       lds_bytes=lds_bytes, rank=rank, buffers=buffers)  # fmt: skip
    return machine.run()

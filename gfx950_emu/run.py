"""One run of a machine's queue in the core, and the report of it."""

from __future__ import annotations

import ctypes
import re
import struct
from typing import TYPE_CHECKING

import numpy as np

from gfx950_emu import report as rep
from gfx950_emu.arguments import READ, buffer_span, loaded_image, pack_kernarg
from gfx950_emu.build import core
from gfx950_emu.decode import decode
from gfx950_emu.records import PIPES, opcodes
from gfx950_emu.report import LaunchReport, Report
from gfx950_emu.settings import DeviceModel, Fault, Schedule

if TYPE_CHECKING:
    from gfx950_emu.machine import Machine, Queued

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


class _Device(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint32) for n in DeviceModel.__dataclass_fields__]


class _Schedule(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_uint32) for n in ("kind", "rank", "workgroup", "wave")),
        *(
            (n, ctypes.c_uint64)
            for n in ("seed", "qmin", "qmax", "max_instructions", "spin_rounds")
        ),
        ("outside_s", ctypes.c_double),
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


class _Fault(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_uint32) for n in ("action", "rank", "trigger", "pad")),
        *((n, ctypes.c_uint64) for n in ("count", "cycles")),
    ]


_DECODED: dict[tuple[str, str], np.ndarray] = {}
KEPT_KERNELS = 128
"""Of _DECODED; about 170 bytes an instruction."""


def decoded(code_object, kernel) -> np.ndarray:
    key = (code_object.digest, kernel.name)
    if key not in _DECODED:
        d = kernel.descriptor
        if len(_DECODED) >= KEPT_KERNELS:
            _DECODED.pop(next(iter(_DECODED)), None)  # the oldest
        _DECODED[key] = decode(kernel.instructions, d.accum_offset, d.vgprs, kernel.name)
    return _DECODED[key]


def places(kernel, where: int | str) -> list[int]:
    """Indices of the instructions that a fault's place names: pc, source line, or text."""
    if isinstance(where, int):
        return [n for n, i in enumerate(kernel.instructions) if i.pc == where]
    if re.search(r":\d+$", where):
        return [
            n
            for n, i in enumerate(kernel.instructions)
            if (kernel.line(i.pc) or "").endswith(where)
        ]
    return [n for n, i in enumerate(kernel.instructions) if i.text.startswith(where)]


class Run:
    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.c = core()
        for which, struct_ in enumerate((None, _Launch, rep.FindingStruct, rep.CounterStruct,
                                         _Device, _Schedule, _Fault)):  # fmt: skip
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

    def code(self, handle, q: Queued) -> tuple[int, np.ndarray]:
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

    def prepare(self, handle, n: int, q: Queued, after: int) -> _Launch:
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
            delay_rounds=q.delay,
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
            s.outside_s,
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
            for fault in m.faults:
                self.add_fault(handle, fault)
            status = self.c.emu_run(handle)
            return self.report(handle, status)
        finally:
            self.c.emu_destroy(handle)

    def add_fault(self, handle, fault: Fault) -> None:
        actions = Fault.ACTIONS
        struct_ = _Fault(
            actions.index(fault.action), fault.rank, fault.trigger, 0, fault.count, fault.cycles
        )
        number = self.c.emu_add_fault(handle, ctypes.byref(struct_))
        if fault.at is None:
            return
        name, where = fault.at
        marks = set()
        for q in self.m.queue:
            if q.kernel.name == name:
                code, _ = self.codes[q.code_object.digest, name]
                marks |= {(code, n) for n in places(q.kernel, where)}
        if not marks:
            raise ValueError(f"fault: no instruction of kernel {name!r} is at {where!r}")
        for code, n in sorted(marks):
            self.c.emu_mark(handle, number, code, n)

    def fault_text(self, handle, number: int, fault: Fault) -> str:
        facts = (ctypes.c_uint64 * 3)()
        done = {"kill": "killed", "delay": f"delayed by {fault.cycles} cycles"}[fault.action]
        if not self.c.emu_fault(handle, number, facts):
            return f"rank {fault.rank} was to be {done}, the run ended before"
        clock, executed, launches = facts
        return (
            f"rank {fault.rank} was {done} at cycle {clock}, after {executed} of its instructions "
            f"and {launches} of its launches"
        )

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
            tuple(self.fault_text(handle, n, f) for n, f in enumerate(self.m.faults)),
        )

    def finding(self, f) -> rep.Finding:
        k = self.m.queue[f.launch].kernel
        i = k.instructions[f.pc_index]
        return rep.Finding(
            rep.FINDINGS[f.kind], k.name, i.pc, i.text, k.line(i.pc), f.rank, f.workgroup, f.wave,
            f.lane, f.addr, rep.detail_of(f.kind, f.addr, f.aux), f.count,
        )  # fmt: skip

    def launch_report(self, handle, n: int, q: Queued) -> LaunchReport:
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

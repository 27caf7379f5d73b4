"""What a run gives back: status, findings, counters, and a modelled bound on its time."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass, field

STATUS = {0: "finished", 1: "deadlock", 2: "cannot start", 3: "instruction limit"}

FINDINGS = {
    1: "register read before its wait",
    2: "register overwritten before its wait",
    3: "LDS race",
    4: "LDS access out of bounds",
    5: "LDS access pending",
    6: "read outside of any buffer",
    7: "write outside of any writable buffer",
    8: "uninitialised value in an address",
    9: "uninitialised value stored",
    10: "branch on an uninitialised value",
    11: "uninitialised EXEC",
    12: "uninitialised LDS",
    13: "misaligned access",
    14: "deadlock",
    15: "barrier divergence",
    16: "workgroups that never became resident",
    17: "stale cache",
    18: "trap",
    19: "not modelled",
    20: "instruction limit",
    21: "LDS read before the LDS DMA was waited for",
    22: "global race",
}
COUNTERS = {0: "vmcnt", 1: "lgkmcnt (LDS)", 2: "lgkmcnt (scalar memory)", 3: "vmcnt and lgkmcnt"}


class FindingStruct(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_uint32) for n in
          ("kind", "launch", "rank", "workgroup", "wave", "lane", "pc_index", "count")),
        ("addr", ctypes.c_uint64),
        ("aux", ctypes.c_uint64),
    ]  # fmt: skip


COUNTER_NAMES = [
    "lds_read_bytes",
    "lds_write_bytes",
    "lds_accesses",
    "lds_conflict_cycles",
    "lds_cycles",
    "global_read_bytes",
    "global_write_bytes",
    "atomic_bytes",
    "smem_bytes",
    "dma_bytes",
    "read_lines",
    "write_lines",
    "read_lines_l2",
    "write_lines_l2",
    "read_lines_l1",
    "write_lines_l1",
    "read_lines_instructions",
    "write_lines_instructions",
    "waves",
    "workgroups",
    "barriers",
    "spin",
    "executed",
    "max_resident_workgroups",
]


class CounterStruct(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in COUNTER_NAMES]


@dataclass(frozen=True)
class Finding:
    kind: str
    kernel: str
    pc: int
    text: str  # the disassembly
    line: str | None  # of the source, when the compiler gave it
    rank: int
    workgroup: int
    wave: int
    lane: int
    address: int
    detail: str
    count: int  # times at this instruction

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return (
            f"{self.kind}: kernel {self.kernel}, pc {self.pc:#x}{where}: {self.text}: rank "
            f"{self.rank}, workgroup {self.workgroup}, wave {self.wave}, lane {self.lane}"
            f"{', ' + self.detail if self.detail else ''}, {self.count} times"
        )


def detail_of(kind: int, address: int, aux: int) -> str:
    if kind in (1, 2):
        name = "v" if address >> 32 else "s"
        return f"{name}{address & 0xFFFFFFFF} not waited for: {COUNTERS.get(aux, aux)}"
    if kind == 3:
        act = "write" if aux & 1 else "read"
        return f"{act} at LDS byte {address} against wave {aux >> 1}"
    if kind == 14:
        state = {0: "polling or running", 1: "at a barrier"}.get(address, str(address))
        return f"{state} after {aux} instructions"
    if kind == 15:
        return f"{address} of {aux} waves had ended"
    if kind == 16:
        return f"{address} workgroups wait while {aux} are resident"
    if kind == 17:
        why = {
            1: "the writer's L2 was not written back (buffer_wbl2, or sc1 on the store)",
            2: "this CU's L1 may hold the line from before the store (buffer_inv; sc1 on the load)",
            3: "this XCD's L2 may hold the line from before the store (buffer_inv sc1)",
            4: "the scalar cache may hold the line from before the store (s_dcache_inv)",
        }[aux]
        return f"address {address:#x}: {why}"
    return f"address {address:#x}" if address else ""


@dataclass(frozen=True)
class Cost:
    """Issue cycles of one wave-instruction on its pipe: a model from public numbers."""

    valu: int = 4
    salu: int = 4
    branch: int = 8
    smem: int = 4
    vmem: int = 4
    misc: int = 4
    mfma_flops_per_cycle: int = 2048  # 16-bit, of a CU


@dataclass(frozen=True)
class Arch:
    """The device for model_time. Defaults: MI350-class public figures."""

    compute_units: int = 256
    clock_hz: float = 2.4e9
    hbm_bytes_per_s: float = 8.0e12
    cost: Cost = field(default_factory=Cost)


# FLOPs a cycle and CU by input type, as multiples of the 16-bit rate.
MFMA_RATE = {"f32": 1 / 8, "f64": 1 / 32, "f16": 1.0, "bf16": 1.0, "i8": 2.0, "f8": 2.0}


def mfma_type(name: str) -> str:
    if "f8f6f4" in name or "fp8" in name or "bf8" in name:
        return "f8"
    return name.rsplit("_", 1)[-1]


@dataclass(frozen=True)
class LaunchReport:
    kernel: str
    rank: int
    instructions: dict[str, int]  # wave-instructions by opcode
    pipes: dict[str, int]
    mfma: dict[str, int]  # FLOPs by shape
    counters: dict[str, int]
    occupancy: int  # waves a SIMD that the registers and LDS allow

    @property
    def executed(self) -> int:
        return self.counters["executed"]

    @property
    def useful(self) -> int:
        """Instructions outside of polling loops."""
        return self.counters["executed"] - self.counters["spin"]

    @property
    def traffic(self) -> dict[str, dict[str, int]]:
        """Bytes of global memory by level, {"read": ..., "written": ...} each: a count, no timing.

        lanes: what the lanes ask for (a scalar load once a wave, an atomic both ways).
        instructions: the 128-byte lines of each wave-instruction, as if there were no cache.
        l1, l2, hbm: lines that a CU, an XCD, the launch touches, each once: caches that start
        empty and never forget. A line that is stored to counts whole; scope bits and scratch
        memory count for nothing.
        """
        c = self.counters
        levels = {
            "lanes": {
                "read": c["global_read_bytes"] + c["dma_bytes"] + c["smem_bytes"]
                + c["atomic_bytes"],
                "written": c["global_write_bytes"] + c["atomic_bytes"],
            }
        }  # fmt: skip
        for name, end in (("instructions", "_instructions"), ("l1", "_l1"), ("l2", "_l2"),
                          ("hbm", "")):  # fmt: skip
            read, written = c[f"read_lines{end}"], c[f"write_lines{end}"]
            levels[name] = {"read": 128 * read, "written": 128 * written}
        return levels

    @property
    def hbm_bytes(self) -> int:
        """Unique 128-byte lines that were read, and written, once each."""
        return sum(self.traffic["hbm"].values())

    def model_time(self, arch: Arch | None = None) -> dict[str, float]:
        """MODELLED seconds: a lower bound, the largest of the pipes' and the memory's times.

        Each CU has 4 SIMDs that issue a VALU instruction of a wave in `cost.valu` cycles, one LDS
        (its cycles by the bank rule), one scalar unit a SIMD; work is spread evenly over the CUs
        that the grid can fill.
        """
        arch = arch or Arch()
        units = min(arch.compute_units, max(self.counters["workgroups"], 1))
        c, p = arch.cost, self.pipes
        per_simd = 4 * units * arch.clock_hz
        flops = sum(
            n / (MFMA_RATE.get(mfma_type(name), 1.0) * c.mfma_flops_per_cycle)
            for name, n in self.mfma.items()
        )
        times = {
            "valu": p.get("valu", 0) * c.valu / per_simd,
            "salu": (p.get("salu", 0) * c.salu + p.get("branch", 0) * c.branch) / per_simd,
            "vmem": p.get("vmem", 0) * c.vmem * 4 / per_simd,
            "lds": self.counters["lds_cycles"] / (units * arch.clock_hz),
            "mfma": flops / (units * arch.clock_hz),
            "hbm": self.hbm_bytes / arch.hbm_bytes_per_s,
        }
        times["bound"] = max(times.values())
        return times


@dataclass(frozen=True)
class Report:
    status: str
    findings: tuple[Finding, ...]
    launches: tuple[LaunchReport, ...]
    executed: int  # wave-instructions of all launches
    clock: int  # virtual cycles
    faults: tuple[str, ...] = ()  # what was injected, and when it happened

    @property
    def ok(self) -> bool:
        return self.status == "finished" and not self.findings

    @property
    def counters(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for launch in self.launches:
            total.update(launch.counters)
        return dict(total)

    def raise_for_findings(self) -> None:
        if not self.ok:
            lines = [f"run ended as: {self.status}", *self.faults, *map(str, self.findings[:20])]
            raise AssertionError("\n".join(lines))

    def model_time(self, arch: Arch | None = None) -> float:
        """MODELLED seconds of the launches one after another."""
        return sum(launch.model_time(arch)["bound"] for launch in self.launches)

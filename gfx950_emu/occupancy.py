"""How many waves fit on a SIMD of gfx950, from a kernel's resources.

The rule, as LLVM's AMDGPU back end has it for gfx90a and later, with the LDS of gfx950 (AMD's
CDNA 4 ISA document: 160 KiB, one register file for ordinary and accumulation VGPRs):

    a compute unit has 4 SIMDs; a SIMD holds at most 8 waves
    VGPRs   512 a lane and SIMD; a wave takes accum_offset + its accumulation registers, in
            granules of 8
    SGPRs   800 a SIMD, in granules of 16
    LDS     160 KiB a compute unit, in granules of 1280 bytes
    16 workgroups of more than one wave share a compute unit at most: each needs a barrier
"""

from __future__ import annotations

from dataclasses import dataclass

from gfx950_emu.code_object import Kernel

SIMDS = 4
WAVES_PER_SIMD = 8
VGPRS = 512
SGPRS = 800
LDS_BYTES, LDS_GRANULE = 160 * 1024, 1280
BARRIER_WORKGROUPS = 16
WAVE_SIZE = 64


@dataclass(frozen=True)
class Occupancy:
    workgroup_waves: int
    workgroups_per_cu: int
    waves_per_simd: float
    limits: dict[str, int]  # workgroups a compute unit that each resource allows

    @property
    def limited_by(self) -> tuple[str, ...]:
        least = min(self.limits.values())
        return tuple(name for name, limit in self.limits.items() if limit == least)


def occupancy(kernel: Kernel, dynamic_lds_bytes: int = 0, lanes: int | None = None) -> Occupancy:
    """For workgroups of `lanes` lanes; by default what the kernel requires or allows at most."""
    if lanes is None:
        x, y, z = kernel.reqd_workgroup_size or (kernel.max_workgroup_size, 1, 1)
        lanes = x * y * z
    waves = -(-lanes // WAVE_SIZE)
    descriptor = kernel.descriptor

    def by_waves(waves_per_simd: int) -> int:
        """Waves of a workgroup are dealt to the SIMDs in turn."""
        return min(waves_per_simd, WAVES_PER_SIMD) * SIMDS // waves

    lds = descriptor.lds_bytes + dynamic_lds_bytes
    granules = -(-lds // LDS_GRANULE)
    limits = {
        "waves": by_waves(WAVES_PER_SIMD),
        "VGPRs": by_waves(VGPRS // descriptor.vgprs),
        "SGPRs": by_waves(SGPRS // descriptor.sgprs),
    }
    if granules:
        limits["LDS"] = LDS_BYTES // (granules * LDS_GRANULE)
    if waves > 1:
        limits["barriers"] = BARRIER_WORKGROUPS
    workgroups = min(limits.values())
    return Occupancy(waves, workgroups, workgroups * waves / SIMDS, limits)

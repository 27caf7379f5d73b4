"""Numbers of the accelerators we plan for. Their only home; sources beside them.

gfx950: AMD Instinct MI355X datasheet and the CDNA4 ISA document. Datasheet peaks, nothing measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """One accelerator. Rates per second, sizes in bytes."""

    name: str
    compute_units: int
    simds_per_cu: int
    wave_size: int
    lds_bytes_per_cu: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    fabric_links: int
    fabric_link_bytes_per_s: float
    """Of one link between two GPUs of a node, each way."""
    clock_hz: float
    fp8_flops: float
    bf16_flops: float


GFX950 = Arch(
    name="gfx950",
    compute_units=256,
    simds_per_cu=4,
    wave_size=64,
    lds_bytes_per_cu=160 * 1024,
    hbm_bytes=288 * 10**9,
    hbm_bytes_per_s=8e12,
    fabric_links=7,
    fabric_link_bytes_per_s=76.8e9,
    clock_hz=2.4e9,
    fp8_flops=5e15,
    bf16_flops=2.5e15,
)

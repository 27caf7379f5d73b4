"""What the launch costs, as counts of the real code object: registers, LDS, bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.bench_mono_gfx950 import LAYOUTS, phase_bytes, shape_of
from gfx950_emu import Checks, Schedule
from mono_kernel import plan
from mono_kernel.layer_gfx950 import Build
from mono_kernel.shapes import Formats, Shape
from mono_kernel.weights import weight_layout
from rocm_msa.arch import GFX950
from rocm_msa.capacity import MINIMAX_M3
from tests.mono_kernel.emulated import Group, compiled
from tests.mono_kernel.steps import Step

REGISTERS = 512  # of a lane, one wave a SIMD


def check_resident(build: Build) -> None:
    """A workgroup a compute unit, nothing spilled, no scratch."""
    entry, _ = compiled(build)
    found = entry.registers
    assert not any(found[n] for n in ("vgpr_spills", "sgpr_spills", "scratch_bytes")), found
    assert found["vgpr"] + found["agpr"] <= REGISTERS
    assert entry.static_lds + entry.dynamic_lds <= GFX950.lds_bytes_per_cu
    assert entry.block == (plan.WAVES * GFX950.wave_size, 1, 1)
    assert GFX950.simds_per_cu == plan.WAVES


def test_resident():
    check_resident(Build.from_shape(Step("mxfp4", 4, [130]).shape))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "exchange"),
    [(1, False), (2, False), (4, False), (8, False), (2, True), (4, True), (8, True)],
)
def test_resident_at_real_widths(tp, exchange):
    shape = Shape.of(MINIMAX_M3, tp, Formats("mxfp8", "nvfp4", "mxfp8"))
    check_resident(Build.from_shape(replace(shape, exchange=exchange)))


def test_only_weights_in_use_are_touched():
    """One row: memory's lines are those of four experts of eight, the pages and small regions."""
    group = Group(Step("mxfp4", 4, [642], 1, seed=2))
    report = group.run(Schedule("round_robin", 0, (1000, 1000)), checks=Checks.NONE)
    assert len(report.launches) == 4  # one a rank
    shape = group.build
    sizes = {r.name: r.nbytes for r in weight_layout(shape)}
    routed = sum(n for name, n in sizes.items() if name.startswith(("up", "down")))
    used = sum(sizes.values()) - routed + routed * shape.chosen // shape.experts
    pages = 6 * 128 * (144 + 72)
    small = plan.scratch_layout(shape, 7).nbytes + plan.state_layout().nbytes
    small += plan.mailbox_layout(shape).nbytes
    for one in report.launches:
        assert 0.9 * used <= one.traffic["hbm"]["read"] <= used + pages + small


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_moves_each_byte_of_weights_once(layout):
    """The benchmark's bytes by phase, with all experts in use and no rows beside."""
    shape = shape_of(layout)
    sizes = {r.name: r.nbytes for r in weight_layout(shape)}
    moved = {name: c[1] for name, c in phase_bytes(shape, 0, 128, shape.experts).items()}
    for phase, region in (("project", "qkv"), ("output", "output"), ("up", "up"), ("down", "down")):
        names = (region, f"{region}_scales", f"shared_{region}", f"shared_{region}_scales")
        assert moved[phase] == sum(sizes.get(name, 0) for name in names), phase
    assert moved["route"] == sizes["router"]
    asked = phase_bytes(shape, 1, 8192, 4)
    for phase in plan.PHASES:
        if phase.count is not None:
            assert asked[phase.name][0] == phase.count(shape, 1), phase.name

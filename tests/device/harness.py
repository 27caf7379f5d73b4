"""Compiling a one-workgroup kernel around a traced function and running it in the emulator."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch

from gfx950_emu import CodeObject, Report, Schedule, launch
from rocm_msa.device.memory import global_bytes
from rocm_msa.flydsl_compile import compile_flydsl


def run(body, tensors: list[torch.Tensor], lanes: int = 64, schedule: Schedule | None = None):
    """Run `body(*Bytes)` in one workgroup on up to four buffers; raises for findings."""
    count = len(tensors)

    @flyc.kernel(name="device_test")
    def kernel(a: fx.Pointer, b: fx.Pointer, c: fx.Pointer, d: fx.Pointer):
        body(*[global_bytes(p) for p in (a, b, c, d)[:count]])

    @flyc.jit
    def start(a: fx.Pointer, b: fx.Pointer, c: fx.Pointer, d: fx.Pointer):
        kernel(a, b, c, d).launch(grid=(1, 1, 1), block=(lanes, 1, 1))

    null = flyc.from_c_void_p(fx.Uint32, None, assumed_align=16)
    compiled = compile_flydsl(start, null, null, null, null, line_info=False)
    code = CodeObject.from_bytes(compiled.code_object)
    args = [*tensors, *[torch.zeros(4)] * (4 - count)]
    report: Report = launch(
        code, compiled.kernel, 1, lanes, args, schedule=schedule or Schedule("random", 1, (1, 50))
    )
    report.raise_for_findings()
    return report

"""All test kernels of the emulator."""

from tests.emulator import (
    kernels_allreduce,
    kernels_flydsl,
    kernels_mfma,
    kernels_triton,
    kernels_triton_dot,
)

CASES = [
    *kernels_triton.CASES,
    *kernels_triton_dot.CASES,
    *kernels_flydsl.CASES,
    *kernels_mfma.CASES,
    *kernels_allreduce.CASES,
]
BY_NAME = {case.name: case for case in CASES}

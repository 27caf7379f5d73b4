"""block_topk on gfx950: one launch, one workgroup a (row, head); traced code in flydsl_kernel.py.

A workgroup holds its row's candidates in registers, so that a build has a capacity in blocks. The
smallest that holds the scores' width is taken. Refused: wider scores, a topk above 64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rocm_msa import launcher
from rocm_msa.arch import GFX950
from rocm_msa.errors import check_int, expect

_SHAPES = ((4, 4), (8, 16))  # (registers, waves), by capacity


@dataclass(frozen=True)
class Build:
    """registers: candidates a lane. waves: of a workgroup. kept: ranks found, the largest topk."""

    registers: int
    waves: int
    kept: int

    def __post_init__(self) -> None:
        check_int("registers", self.registers, 1)
        check_int("waves", self.waves, 1)
        check_int("kept", self.kept, 1)
        if self.kept > GFX950.wave_size:
            raise ValueError(expect("kept", f"<= {GFX950.wave_size}", self.kept))

    @property
    def symbol(self) -> str:
        return f"block_topk_r{self.registers}_w{self.waves}_k{self.kept}"

    @property
    def grid(self) -> str:
        return "(rows, heads)"

    @property
    def capacity(self) -> int:
        """Blocks of a row."""
        return self.registers * self.waves * GFX950.wave_size


def builds(config) -> list[Build]:
    """For rows of every length up to the largest capacity; see aot.ServingConfig."""
    return [Build(*shape, config.topk) for shape in _SHAPES]


def needs(scores, num_blocks, topk, init_blocks, local_blocks, out=None) -> list[Build]:
    """The build for these arguments of block_topk; reads no values."""
    wave = GFX950.wave_size
    if topk > wave:
        raise NotImplementedError(expect("topk on flydsl", f"<= {wave}", topk))
    for shape in _SHAPES:
        build = Build(*shape, topk)
        if scores.shape[-1] <= build.capacity:
            return [build]
    raise NotImplementedError(
        expect("max_blocks on flydsl", f"<= {build.capacity}", scores.shape[-1])
    )


def run(
    scores: torch.Tensor,
    num_blocks: torch.Tensor,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: torch.Tensor | None = None,
    *,
    builds: list[Build] | None = None,
) -> torch.Tensor:
    """int32 `[heads, rows, topk]`; see api.py."""
    (build,) = builds or needs(scores, num_blocks, topk, init_blocks, local_blocks)
    heads, rows, max_blocks = scores.shape
    if out is None:
        out = torch.empty(heads, rows, topk, dtype=torch.int32, device=scores.device)
    if rows == 0 or heads == 0:
        return out
    if max_blocks == 0:
        return out.fill_(-1)
    launcher.launch(
        build, (rows, heads),
        [scores, *scores.stride(), num_blocks, num_blocks.stride(0), max_blocks,
         topk, init_blocks, local_blocks, out, *out.stride()],
        scores.device,
    )  # fmt: skip
    return out


def compile_build(build: Build):
    """rocm_msa.flydsl_compile.Compiled of one kernel."""
    from rocm_msa.ops.block_topk import flydsl_kernel

    return flydsl_kernel.compile_build(build)

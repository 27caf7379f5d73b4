"""A small kernel in the form that an op's flydsl_gfx950.py has: y = a x + b, b read from LDS."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_msa import launcher
from rocm_msa.errors import check_int

LANES = 256


@dataclass(frozen=True)
class Build:
    """offset: added to each element; twice: of the result."""

    offset: int
    twice: bool = False

    def __post_init__(self) -> None:
        check_int("offset", self.offset, 0)

    @property
    def symbol(self) -> str:
        return f"toy_add{self.offset}{'_twice' if self.twice else ''}"

    @property
    def grid(self) -> str:
        return f"(elements / {LANES})"


def builds(config) -> list[Build]:
    return [Build(config.topk), Build(config.topk, twice=True)]


def needs(x, a, offset=16, twice=False) -> list[Build]:
    if x.dim() != 1:
        raise NotImplementedError("x: expected one dimension")
    return [Build(offset, twice)]


def run(x, a, offset=16, twice=False, builds=None):
    (build,) = builds or needs(x, a, offset, twice)
    y = x.new_zeros(x.shape)
    launcher.launch(build, (-(-len(x) // LANES),), [x, y, a, len(x), 2**40], x.device)
    return y


def compile_build(build: Build):
    from tests.launcher.toy_kernel import compile_kernel

    return compile_kernel(build)

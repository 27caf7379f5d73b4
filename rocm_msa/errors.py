"""Errors that name the argument, what was expected and what came; and a collector of refusals.

`TypeError` for a dtype, `ValueError` for shape, stride, alignment or range,
`NotImplementedError` for something legal that is not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class ConfigError(ValueError):
    """A model or serving configuration that cannot be served, with every reason at once."""

    def __init__(self, subject: str, reasons: Sequence[str]):
        self.subject = subject
        self.reasons = tuple(reasons)
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"{subject}:{lines}")


class Refusals:
    """Collects the reasons against a configuration, to report all of them in one error."""

    def __init__(self, subject: str):
        self.subject = subject
        self.reasons: list[str] = []

    def check(self, ok: bool, reason: str) -> bool:
        """Record `reason` unless `ok`; returns `ok`."""
        if not ok:
            self.reasons.append(reason)
        return ok

    def raise_if_any(self) -> None:
        if self.reasons:
            raise ConfigError(self.subject, self.reasons)


def expect(name: str, expected: object, got: object) -> str:
    """The one wording of a bad-argument message."""
    return f"{name}: expected {expected}, got {got}"


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | str | None],
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    *,
    align: int | None = None,
    inner_contiguous: bool = False,
) -> None:
    """Check one tensor argument before a launch.

    Args:
        name: the argument's name in the message.
        shape: one entry a dimension; an int must match, a str names a free dimension in the
            message, None is free and unnamed.
        dtype: the dtype, or a sequence of allowed ones.
        align: required alignment of the data pointer, bytes.
        inner_contiguous: the last dimension must have stride 1.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: shape, stride or alignment.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(expect(name, "a torch.Tensor", type(tensor).__name__))
    if dtype is not None:
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        if tensor.dtype not in allowed:
            wanted = " or ".join(str(d) for d in allowed)
            raise TypeError(expect(f"{name}.dtype", wanted, tensor.dtype))
    wanted_shape = "[" + ", ".join("*" if s is None else str(s) for s in shape) + "]"
    got_shape = list(tensor.shape)
    if len(got_shape) != len(shape) or any(
        isinstance(want, int) and want != got for want, got in zip(shape, got_shape, strict=True)
    ):
        raise ValueError(expect(f"{name}.shape", wanted_shape, got_shape))
    if inner_contiguous and tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(expect(f"{name}.stride(-1)", 1, tensor.stride(-1)))
    if align is not None and tensor.numel() > 0 and tensor.data_ptr() % align:
        raise ValueError(
            expect(f"{name}.data_ptr()", f"a multiple of {align} bytes", hex(tensor.data_ptr()))
        )

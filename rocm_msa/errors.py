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
    device: torch.device | None = None,
) -> None:
    """Check one tensor argument before a launch.

    Args:
        name: the argument's name in the message.
        shape: one entry a dimension; an int must match, a str names a free dimension in the
            message, None is free and unnamed.
        dtype: the dtype, or a sequence of allowed ones.
        align: required alignment of the data pointer, bytes.
        inner_contiguous: the last dimension must have stride 1.
        device: the device of the other arguments.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: shape, stride, alignment or device.
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
    if device is not None and tensor.device != device:
        raise ValueError(
            expect(f"{name}.device", f"{device}, as the other arguments", tensor.device)
        )
    if inner_contiguous and tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(expect(f"{name}.stride(-1)", 1, tensor.stride(-1)))
    if align is not None and tensor.numel() > 0 and tensor.data_ptr() % align:
        raise ValueError(
            expect(f"{name}.data_ptr()", f"a multiple of {align} bytes", hex(tensor.data_ptr()))
        )


def check_output(
    tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Check an `out` argument: as `check_tensor`, any strides, no element in two places.

    Raises:
        TypeError, ValueError: see `check_tensor`; strides that overlap.
    """
    check_tensor("out", tensor, shape, dtype, device=device)
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                expect("out.stride()", "elements that do not overlap", tuple(tensor.stride()))
            )
        reach += stride * (size - 1)


def check_int(name: str, value: object, low: int) -> None:
    """Check a count. Raises TypeError unless an int, ValueError below `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(expect(name, "an int", repr(value)))
    if value < low:
        raise ValueError(expect(name, f">= {low}", value))

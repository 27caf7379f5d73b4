"""A graph on the CPU: what torch.cuda.graph keeps of a step is recorded, and replayed in place.

    graph = RecordedGraph(gpu)
    with graph.capturing():
        out = model(...)          # nothing is computed: `out` holds poison
    inputs.copy_(...)
    graph.replay()                # now `out` holds the result

As a GPU's capture, a recording takes every aten call and every launch in the emulator (of compiled
kernels, and of Triton's under tests/ops/emulated_triton.py) with the memory that it reads and
writes, runs none of them, and refuses what would need a value on the host or bring one from there
(`Refused`). A replay runs them in order on the same memory. New tensors of
the recording are its pool: they hold poison before each replay, so that whatever was kept from the
capture or an earlier replay shows.

An op whose CPU code is not made of capturable parts, while its GPU code is one launch, is recorded
whole with `kernel`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rocm_msa import launcher
from rocm_msa.emulated import EmulatedGpu
from tests.ops.emulated_triton import Emulation

READS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::repeat_interleave.Tensor",
}
"""Ops that wait for a value: of a number, or of the size of what comes out."""
UPLOADS = {"aten::lift", "aten::lift_fresh", "aten::lift_fresh_copy"}
"""What torch.tensor(...) of values on the host calls."""
_ON_HOST = ("cpu", "numpy", "tolist")
POISON = -1_234_567


class Refused(RuntimeError):
    """Something in a capture that no graph can hold."""


class RecordedGraph:
    """One graph.

    Args:
        gpu: whose launches are recorded too.
        host: tensors in host memory, which may be read.

    Attributes:
        calls: what a replay runs, in order. pool: the recording's own tensors.
    """

    current: RecordedGraph | None = None
    """The one that is being captured."""

    def __init__(self, gpu: EmulatedGpu | None = None, host: Sequence[torch.Tensor] = ()) -> None:
        self.gpu, self.host = gpu, [x.untyped_storage().data_ptr() for x in host]
        self.calls: list[Callable[[], Any]] = []
        self.pool: list[torch.Tensor] = []

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Record what is called inside."""
        if RecordedGraph.current is not None:
            raise RuntimeError("a graph is captured while another one is")
        patches = [mock.patch.object(torch.Tensor, n, self._refusing(n)) for n in _ON_HOST]
        patches.append(mock.patch.object(launcher, "capturing", lambda device: True))
        if self.gpu is not None:
            patches.append(mock.patch.object(self.gpu, "launch", self._launch))
        patches.append(mock.patch.object(Emulation, "launch", self._triton(Emulation.launch)))
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            RecordedGraph.current = self
            stack.callback(setattr, RecordedGraph, "current", None)
            stack.enter_context(_Recording(self))
            yield

    def replay(self) -> None:
        """Run everything in order, on memory that held poison before."""
        if RecordedGraph.current is not None:
            raise RuntimeError("a graph is replayed inside a capture")
        for tensor in self.pool:
            tensor.fill_(_poison(tensor, POISON))
        for call in self.calls:
            call()

    def on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.host

    def _refusing(self, name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if not self.on_host(tensor):
                raise Refused(f"Tensor.{name} reads {list(tensor.shape)} values on the host")
            return original(tensor, *args, **options)

        return method

    def _launch(self, function, grid, block, lds, stream, kernarg, subject) -> None:
        """Of EmulatedGpu: keeps the bytes of the arguments, as the runtime of a GPU does."""
        buffers, launch = list(self.gpu.buffers), type(self.gpu).launch

        def run() -> None:
            self.gpu.buffers = buffers
            launch(self.gpu, function, grid, block, lds, stream, kernarg, subject)

        self.calls.append(run)

    def _triton(self, launch: Callable[..., None]) -> Callable[..., None]:
        def method(emulation, fn, grid, args, options) -> None:
            self.calls.append(lambda: launch(emulation, fn, grid, args, options))

        return method


class _Recording(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, schema = func.name(), func._schema
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        device = [x for x in tensors if not self.graph.on_host(x)]
        if tensors and not device:
            return func(*args, **kwargs)  # of the host alone
        indices = args[1] if name.startswith("aten::index.") else ()
        masks = [x for x in indices if x is not None and x.dtype in (torch.bool, torch.uint8)]
        if name in READS or masks:
            raise Refused(f"{name} waits for values of {[list(x.shape) for x in device]}")
        if name in UPLOADS:
            raise Refused(f"{name} copies {list(args[0].shape)} values from the host")
        if schema.is_mutable:
            self.graph.calls.append(lambda: func(*args, **kwargs))
            return _written(schema, args, kwargs)
        outs = func(*args, **kwargs)
        made = [x for x in tree_leaves(outs) if isinstance(x, torch.Tensor)]
        known = {x.untyped_storage().data_ptr() for x in tensors}
        new = [x for x in made if x.untyped_storage().data_ptr() not in known]
        if not new:
            return outs  # views
        self.graph.pool += new
        if "empty" not in name:
            self.graph.calls.append(lambda: _again(func, args, kwargs, made))
        for tensor in new:
            tensor.fill_(_poison(tensor, 0))  # indices stay in range while shapes are found
        return outs


def kernel(call: Callable[..., torch.Tensor | None], writes: str | None = None) -> Callable:
    """`call`, recorded as one launch where a capture is under way.

    writes: name of the argument that it writes; None: it returns a tensor like its first one.
    """

    def run(*args: Any, **options: Any) -> torch.Tensor | None:
        graph = RecordedGraph.current
        if graph is None:
            return call(*args, **options)
        if writes is not None:
            graph.calls.append(lambda: call(*args, **options))
            return options[writes]
        out = torch.empty_like(args[0])
        graph.calls.append(lambda: out.copy_(call(*args, **options)))
        return out

    return run


def _again(func, args, kwargs, made: Sequence[torch.Tensor]) -> None:
    outs = func(*args, **kwargs)
    again = [x for x in tree_leaves(outs) if isinstance(x, torch.Tensor)]
    for kept, new in zip(made, again, strict=True):
        kept.copy_(new)


def _written(schema, args, kwargs):
    """What a call that writes its arguments returns: those."""
    given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    outs = [
        given[a.name]
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in given
    ]
    count = len(schema.returns)
    return None if count == 0 else outs[0] if count == 1 else tuple(outs[:count])


def _poison(tensor: torch.Tensor, number: int) -> float | int:
    if tensor.is_floating_point():
        return float("nan")
    bits = torch.iinfo(tensor.dtype).bits if tensor.dtype is not torch.bool else 1
    return number % 2 ** (bits - 1) if bits < 32 else number

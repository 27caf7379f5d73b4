"""A rank's mono kernel on a GPU: its memory, launches that may be captured, faults, reset.

    runner = MonoRunner(group, shape, max_blocks=4096, device="cuda")     # collective
    packed = runner.load(layer_weights)                                   # once a layer
    runner.run(packed, caches, batch, hidden, residual, hidden_out, residual_out)   # a launch
    runner.check()                                                        # raises MonoError
    runner.close()                                                        # collective

Everything is allocated by the constructor and no address changes. `run` neither allocates nor waits
nor reads the device. One runner serves all layers of a shape, one after another on one stream: they
share scratch and mailboxes. One kernel serves every number of rows: nothing is compiled or warmed.
Generations are 64-bit numbers on the device: nothing has to be reset before they wrap.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch

from mono_kernel import plan, regions
from mono_kernel.batch import Batch
from mono_kernel.faults import decode
from mono_kernel.layer_gfx950 import Build, Memory, arguments
from mono_kernel.shapes import Shape
from mono_kernel.weights import LUT_FOLD, LayerWeights
from rocm_msa import launcher
from rocm_msa.arch import GFX950
from rocm_msa.cache.paged import IndexCache, MainCache
from rocm_msa.comm.group import as_group
from rocm_msa.comm.peer_memory import PeerMemory
from rocm_msa.comm.runtime import PeerRuntime
from rocm_msa.errors import check_int, expect
from rocm_msa.ops.flydsl_host import lut_table

logger = logging.getLogger(__name__)

PROTOCOL = 1
"""Changes with the meaning of a byte in the mailboxes."""


class MonoRunner:
    """One rank's end.

    Args:
        group: a torch.distributed group, or see rocm_msa.comm.group.Group; one rank a GPU.
        shape: this rank's share; the same on all ranks.
        max_blocks: most blocks of a request in a batch's table.
        device: this rank's GPU.
        patience_ms: after which a wait for one missing peer ends.
        workgroups: of a launch; None: one a compute unit.
        runtime: of the peer memory; None finds torch's.
        kernels: what launches; None: what launcher.py has loaded for `device`.

    Attributes:
        memory: what the kernel is given besides a launch's own arguments. status: int64 [1] on the
        host, the word that a kernel writes an error to.

    Raises:
        PeerMemoryError: on all ranks alike, with every rank's reasons.
        TypeError, ValueError: arguments that are wrong by themselves; before any rank is asked.
    """

    def __init__(
        self,
        group: Any,
        shape: Shape,
        *,
        max_blocks: int,
        device: torch.device | str,
        patience_ms: int = 1000,
        workgroups: int | None = None,
        runtime: PeerRuntime | None = None,
        kernels: launcher.Launcher | None = None,
    ) -> None:
        self._group = as_group(group)
        if self._group.ranks != shape.tp:
            raise ValueError(expect("group", f"{shape.tp} ranks (shape.tp)", self._group.ranks))
        check_int("max_blocks", max_blocks, 1)
        check_int("patience_ms", patience_ms, 1)
        workgroups = plan.grid() if workgroups is None else workgroups
        plan.check_workgroups(workgroups, GFX950.compute_units)
        self._shape, self.build, self.max_blocks = shape, Build.from_shape(shape), max_blocks
        self.device, self._kernels = torch.device(device), kernels
        layout = plan.mailbox_layout(shape, max_blocks)
        self._peers = PeerMemory(
            self._group, layout.nbytes, self.device, runtime=runtime,
            terms={
                "protocol": PROTOCOL,
                "shape": shape.name,
                "layout": _digest(layout),
                "workgroups": workgroups,
                "patience_ms": patience_ms,
            },
        )  # fmt: skip
        state, scratch = (
            torch.zeros(n, dtype=torch.uint8, device=self.device)
            for n in (plan.state_layout().nbytes, plan.scratch_layout(shape, max_blocks).nbytes)
        )
        pinned = self.device.type == "cuda"
        self.status = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        places = [*self._peers.addresses, self.status.data_ptr()]
        addresses = torch.tensor(places, dtype=torch.int64, device=self.device)
        self.memory = Memory(
            scratch, state, addresses, self._group.rank, patience_ms, workgroups, max_blocks
        )  # fmt: skip
        self._generation.fill_(1)
        lut_table(LUT_FOLD, self.device)  # uploaded now, so that no capture meets it first
        self._synchronize()  # ready for the first launch, on whatever stream
        logger.info(
            "mono kernel %s: %d bytes of scratch, %d of mailbox",
            *(shape.name, scratch.numel(), layout.nbytes),
        )

    def load(self, weights: LayerWeights) -> torch.Tensor:
        """A layer's weights as `run` takes them, on the device."""
        if weights.shape != self._shape:
            raise ValueError(expect("weights.shape", self._shape, weights.shape))
        return weights.packed().to(self.device)

    def run(
        self,
        weights: torch.Tensor,
        caches: tuple[MainCache, IndexCache],
        batch: Batch,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        hidden_out: torch.Tensor,
        residual_out: torch.Tensor,
    ) -> None:
        """Queue one layer on torch's current stream; see layer_gfx950.arguments.

        Raises:
            RuntimeError: the runner is closed. MonoError: an earlier launch failed.
            TypeError, ValueError, NotImplementedError: an argument that does not fit, by name.
        """
        if self._peers.closed:
            raise RuntimeError("the mono kernel's runner is closed")
        self.check()
        blocks = batch.block_table.shape[1]
        if blocks > self.max_blocks:
            raise ValueError(expect("block_table.shape[1]", f"<= {self.max_blocks}", blocks))
        args = arguments(
            self.build, self.memory, weights, caches, batch, hidden, residual, hidden_out,
            residual_out,
        )  # fmt: skip
        grid = (self.memory.workgroups,)
        if self._kernels is None:
            launcher.launch(self.build, grid, args, self.device)
        else:
            self._kernels.launch(self.build, grid, args)

    def check(self) -> None:
        """Raise the error of a launch that failed. The kernel writes it to host memory: no wait."""
        error = decode(int(self.status))
        if error is not None:
            raise error

    def reset(self) -> None:
        """Forget an error, on all ranks together: collective, waits for the device.

        The next launch is the first one again.
        """
        self._synchronize()
        self._group.all_gather_object("reset: my launches are over")
        nbytes = plan.mailbox_layout(self._shape, self.max_blocks).nbytes
        self._peers.view(0, (nbytes,), torch.uint8).zero_()
        self.memory.state.zero_()
        self._generation.fill_(1)
        self.status.zero_()
        self._synchronize()
        self._group.all_gather_object("reset: my mailbox is empty")

    def region(self, name: str) -> torch.Tensor:
        """A view of a region of scratch, see regions.view; rows beyond the batch's are older."""
        return regions.view(self._shape, self.memory.scratch, name)

    @property
    def generation(self) -> int:
        """Of the next launch; waits for the device."""
        return int(self._generation)

    def close(self) -> None:
        """Collective, unless there is an error: then nothing is asked of the others."""
        self._peers.close(wait=int(self.status) == 0)

    @property
    def _generation(self) -> torch.Tensor:
        where = plan.state_layout()["generation"]
        return self.memory.state[where.offset : where.end].view(torch.int64)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _digest(layout) -> str:
    """Of every offset that the ranks must agree on."""
    return hashlib.sha256(repr(layout.regions).encode()).hexdigest()[:16]

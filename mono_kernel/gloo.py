"""The layer for CPU tensors: reference.py on this rank, its two sums over torch.distributed.

Same use and same faults as runner.MonoRunner; in place of a kernel, PyTorch and messages between
the ranks of a gloo group. Parts of a sum are added in rank order on every rank: all ranks have the
same bits, those of `reference.layer`.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from mono_kernel import reference
from mono_kernel.batch import Batch
from mono_kernel.faults import MonoError, sum_site
from mono_kernel.layer_gfx950 import check_call
from mono_kernel.shapes import Shape
from mono_kernel.weights import LayerWeights
from rocm_msa.cache.paged import IndexCache, MainCache
from rocm_msa.comm.messages import PeerFault, swap
from rocm_msa.errors import check_int, expect

logger = logging.getLogger(__name__)


class GlooRunner:
    """One process's end.

    Args:
        group: a process group of a backend for CPU tensors; None is the default group. Nothing
            else may send point to point in it while a launch runs.
        shape: this rank's share; the same on all ranks.
        max_blocks: most blocks of a request in a batch's table.
        timeout_s: seconds that one message may take.

    Attributes:
        generation: of the next launch, counted from 1.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        shape: Shape,
        *,
        max_blocks: int,
        timeout_s: float = 60.0,
    ) -> None:
        check_int("max_blocks", max_blocks, 1)
        if timeout_s <= 0:
            raise ValueError(expect("timeout_s", "> 0", timeout_s))
        self.group, self.shape, self.max_blocks = group, shape, max_blocks
        self.rank, ranks = (0, 1) if shape.tp == 1 else _place(group)
        if ranks != shape.tp:
            raise ValueError(expect("group", f"{shape.tp} ranks (shape.tp)", ranks))
        self.timeout = timedelta(seconds=timeout_s)
        self.generation = 1
        self._error: MonoError | None = None
        self._closed = False

    def load(self, weights: LayerWeights) -> LayerWeights:
        """A layer's weights as `run` takes them: as they are."""
        if weights.shape != self.shape:
            raise ValueError(expect("weights.shape", self.shape, weights.shape))
        return weights

    def run(
        self,
        weights: LayerWeights,
        caches: tuple[MainCache, IndexCache],
        batch: Batch,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        hidden_out: torch.Tensor,
        residual_out: torch.Tensor,
    ) -> None:
        """Compute one layer; see layer_gfx950.check_call.

        Raises:
            RuntimeError: the runner is closed. MonoError: this launch or an earlier one failed.
            TypeError, ValueError, NotImplementedError: an argument that does not fit, by name.
        """
        if self._closed:
            raise RuntimeError("the mono kernel's runner is closed")
        self.check()
        check_call(
            self.shape, caches, batch, self.max_blocks,
            hidden=hidden, residual=residual, hidden_out=hidden_out, residual_out=residual_out,
        )  # fmt: skip
        generation, self.generation = self.generation, self.generation + 1
        self._agree(generation, batch)
        r = reference.attention(weights, batch, caches, hidden, residual)
        total = self._sum("output", generation, reference.output_part(weights, r))
        r = reference.experts(weights, r, total)
        residual_out.copy_(r["residual_out"])
        total = self._sum("down", generation, reference.down_part(weights, r))
        hidden_out.copy_(total.to(hidden_out.dtype))

    def check(self) -> None:
        """Raise the error of a launch that failed."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """The group stays: it is the caller's."""
        self._closed = True

    # --- messages ---

    def _agree(self, generation: int, batch: Batch) -> None:
        """Every peer is at this launch, with this batch; one at another counts as missing."""
        header = {
            "generation": generation,
            "requests": batch.seq_lens.shape[0],
            "rows": batch.rows,
            "max_blocks": batch.block_table.shape[1],
            "sum of seq_lens": int(batch.seq_lens.sum()),
            "sum of starts": int(batch.starts.sum()),
        }
        mine = torch.tensor(list(header.values()), dtype=torch.int64)
        for peer, values in enumerate(self._gather("output", generation, mine)):
            for (name, want), got in zip(header.items(), values.tolist(), strict=True):
                if got != want:
                    detail = expect(f"{name} of rank {peer}", f"{want}, as here", got)
                    self._fail(peer, "output", generation, detail)

    def _sum(self, phase: str, generation: int, part: torch.Tensor) -> torch.Tensor:
        return reference.in_rank_order(self._gather(phase, generation, part.contiguous()))

    def _gather(self, phase: str, generation: int, mine: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order."""
        ranks = range(self.shape.tp)
        found = [mine if rank == self.rank else torch.empty_like(mine) for rank in ranks]
        peers = [rank for rank in ranks if rank != self.rank]
        try:
            into = {peer: found[peer] for peer in peers}
            swap(self.group, dict.fromkeys(peers, mine), into, self.timeout)
        except PeerFault as fault:
            self._fail(fault.peer, phase, generation, str(fault), cause=fault.__cause__)
        return found

    def _fail(
        self,
        peer: int,
        phase: str,
        generation: int,
        detail: str,
        cause: BaseException | None = None,
    ) -> NoReturn:
        self._error = MonoError(self.rank, peer, sum_site(phase), generation)
        logger.error("%s: %s", self._error, detail)
        raise self._error from cause


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)

"""What changes from step to step, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Batch:
    """Requests of one or several rows each, at most 16 of either.

    positions, main_slots, index_slots: int64 [rows]; a slot of -1 writes nothing. block_table:
    int32 [requests, max_blocks]. seq_lens: int32 [requests], this step's rows included; 0 is a
    padded request. starts: int32 [requests + 1], the first row of each request, from 0, and behind
    them the end of the last: rows from there on are padding. most_rows: that any request has; 1
    only where none has more. cos_sin: fp32 [positions, rotary_dim].
    """

    positions: torch.Tensor
    main_slots: torch.Tensor
    index_slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    most_rows: int
    cos_sin: torch.Tensor

    @property
    def rows(self) -> int:
        return self.positions.shape[0]

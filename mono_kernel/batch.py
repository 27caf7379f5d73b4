"""What changes from step to step, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Batch:
    """Requests of equally many rows, at most 16 rows in all.

    positions, main_slots, index_slots: int64 [rows]; a slot of -1 writes nothing. block_table:
    int32 [requests, max_blocks]. seq_lens: int32 [requests], this step's rows included; 0 is a
    padded request. cos_sin: fp32 [positions, rotary_dim].
    """

    positions: torch.Tensor
    main_slots: torch.Tensor
    index_slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    rows_per_request: int
    cos_sin: torch.Tensor

    @property
    def rows(self) -> int:
        return self.seq_lens.shape[0] * self.rows_per_request

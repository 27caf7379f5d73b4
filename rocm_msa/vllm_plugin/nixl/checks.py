"""Debug mode: every block carries an identity and checksums that the reader compares.

The prefill rank keeps a table int64 `[blocks, 1 + runs]`. Column 0 is the identity of the tokens
that the block holds (a digest of the prompt up to the block's end), 0 while nobody may read it;
the others are checksums of the block's runs: each head of each page, each index page. The reader
reads the table's rows after the data and compares the identity with that of its own prompt and the
checksums with those of the bytes that arrived. A block that was released, reused or torn differs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from rocm_msa.cache.outer_block import OuterBlockRow
from rocm_msa.config import BLOCK_TOKENS

Run = tuple[int, int, int, int]
"""page index, head in the page, offset in the row, bytes."""


def identities(tokens: Sequence[int]) -> list[int]:
    """Identity of each block of a prompt: non-zero int64, of all tokens up to the block's end."""
    out, digest = [], b""
    for start in range(0, len(tokens), BLOCK_TOKENS):
        block = np.asarray(tokens[start : start + BLOCK_TOKENS], dtype=np.int64)
        digest = hashlib.blake2b(digest + block.tobytes(), digest_size=8).digest()
        out.append(int.from_bytes(digest, "little", signed=True) or 1)
    return out


def runs_of(row: OuterBlockRow) -> list[Run]:
    """The runs of a row, in the order of the table's columns."""
    runs = []
    for index, page in enumerate(row.pages):
        for head in range(page.page.kv_heads):
            nbytes = page.page.head_bytes
            runs.append((index, head, page.offset + head * nbytes, nbytes))
    return runs


def checksums(rows: torch.Tensor, blocks: Sequence[int], row: OuterBlockRow) -> torch.Tensor:
    """int64 `[len(blocks), runs]`: Σ word · odd weight (mod 2^64) over 32-bit words of a run."""
    words = rows[torch.as_tensor(blocks, device=rows.device)].view(torch.int32)
    sums = []
    for _, _, offset, nbytes in runs_of(row):
        run = words[:, offset // 4 : (offset + nbytes) // 4].to(torch.int64)
        weights = 2 * torch.arange(run.shape[1], device=rows.device) + 1
        sums.append((run * weights * 0x9E3779B97F4A7C1).sum(dim=1))
    return torch.stack(sums, dim=1)


class BlockTable:
    """The prefill rank's table."""

    def __init__(self, rows: torch.Tensor, row: OuterBlockRow):
        self._rows, self._row = rows, row
        self._readers: Counter[int] = Counter()
        width = 1 + len(runs_of(row))
        self.table = torch.zeros(len(rows), width, dtype=torch.int64, device=rows.device)

    def publish(self, blocks: Sequence[int], block_identities: Sequence[int]) -> None:
        """The blocks are final and may be read. Blocks may be published by several requests."""
        if not blocks:
            return
        ids = torch.as_tensor(blocks, device=self.table.device)
        self.table[ids, 1:] = checksums(self._rows, blocks, self._row)
        self.table[ids, 0] = torch.as_tensor(block_identities, device=self.table.device)
        self._readers.update(blocks)

    def withdraw(self, blocks: Sequence[int]) -> None:
        """A request no longer holds them; without a holder they are not to be read."""
        self._readers.subtract(blocks)
        free = [b for b in blocks if self._readers[b] <= 0]
        for block in free:
            del self._readers[block]
        if free:
            self.table[torch.as_tensor(free, device=self.table.device), 0] = 0


def compare(
    expected: Sequence[int],
    arrived: torch.Tensor,
    received: torch.Tensor,
    columns: Sequence[tuple[int, int]],
) -> str | None:
    """The first difference between what a prefill rank declared and what arrived.

    Args:
        expected: identity of each block, from the reader's own prompt.
        arrived: checksums of the local bytes, `[blocks, local runs]`.
        received: the prefill rank's table rows, `[blocks, 1 + remote runs]`.
        columns: (local run, remote run) pairs that this rank delivered.
    """
    got = received[:, 0].tolist()
    for position, (want, have) in enumerate(zip(expected, got, strict=True)):
        if want != have:
            return f"block {position}: identity expected {want:#x}, got {have:#x}"
    local = torch.as_tensor([c[0] for c in columns], device=arrived.device)
    remote = torch.as_tensor([c[1] + 1 for c in columns], device=received.device)
    wrong = (arrived[:, local] != received[:, remote].to(arrived.device)).nonzero()
    if len(wrong):
        position, column = wrong[0].tolist()
        return f"block {position}: checksum of run {columns[column][0]} differs"
    return None

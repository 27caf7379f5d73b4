"""What an exchange sends, and when it pays: integers and shapes only, the same on every rank.

Everything here is a function of sizes that the host knows and that a captured graph fixes: the
requests, the rows a request, the width of the block table. Never of lengths on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dcp.shard import Shard

SCORE_BYTES = 4
"""A block's score, fp32."""
CANDIDATE_BYTES = 8
"""A candidate: its score's order key and its logical block id, int32 each."""


@dataclass(frozen=True)
class Batch:
    """Shape of a decode batch; max_blocks: the widest that any request of it may be, in blocks."""

    requests: int
    rows_per_request: int
    max_blocks: int

    @property
    def rows(self) -> int:
        return self.requests * self.rows_per_request


class Results(Enum):
    """What a rank sends to the owners of a head, for each row."""

    SCORES = "scores"
    """The score of each of its blocks."""
    CANDIDATES = "candidates"
    """The `topk` best of its blocks, best first: order key and block id; key lowest, id -1 after
    the last. Exact: of a rank's blocks no more can be selected, whatever the others hold."""


def result_bytes(shard: Shard, max_blocks: int, topk: int, results: Results) -> int:
    """Bytes that a rank sends to one owner of a head for one row."""
    if results is Results.SCORES:
        return shard.slots(max_blocks) * SCORE_BYTES
    return topk * CANDIDATE_BYTES


def choose_results(shard: Shard, max_blocks: int, topk: int) -> Results:
    """The form with fewer bytes; with as many, the scores, which take no selection to make."""
    return min(Results, key=lambda form: result_bytes(shard, max_blocks, topk, form))

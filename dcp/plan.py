"""What an exchange sends, and when it pays: integers and shapes only, the same on every rank.

Everything here is a function of sizes that the host knows and that a captured graph fixes: the
requests, the rows a request, the width of the block table. Never of lengths on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import ceil

from dcp.shard import Shard
from rocm_msa.arch import GFX950

SCORE_BYTES = 4
"""A block's score, fp32."""
CANDIDATE_BYTES = 8
"""A candidate: its score's order key and its logical block id, int32 each."""
TAGGED = 2
"""Bytes in a mailbox for each byte said: every 32-bit word has its launch's tag beside it."""


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
    """Bytes that a rank tells one owner of a head for one row, without tags."""
    if results is Results.SCORES:
        return shard.slots(max_blocks) * SCORE_BYTES
    return topk * CANDIDATE_BYTES


def choose_results(shard: Shard, max_blocks: int, topk: int) -> Results:
    """The form with fewer bytes; with as many, the scores, which take no selection to make."""
    return min(Results, key=lambda form: result_bytes(shard, max_blocks, topk, form))


def representatives(shard: Shard, most: Batch, topk: int) -> list[Batch]:
    """Batches that stand for all up to `most`, for what is compiled by the next power of two of
    requests and by the form of the results."""
    requests = {most.requests, *(1 << i for i in range(most.requests.bit_length()))}
    widths = {min(most.max_blocks, shard.ranks), most.max_blocks}
    by_form = {choose_results(shard, width, topk): width for width in sorted(widths)}
    return [
        Batch(count, most.rows_per_request, width)
        for count in sorted(requests)
        for width in by_form.values()
    ]


@dataclass(frozen=True)
class Costs:
    """What the choice rests on. The defaults are modelled for gfx950: none of them was measured.

    fixed_s: a launch of the exchange beyond its share of the scan and its bytes, in seconds: two
        waits for the fabric and the slowest rank. 7 us is what a public implementation reports
        for four MI355X.
    scan_bytes_per_s: at which one rank reads index pages. The datasheet's peak, so that what the
        ranks save is not overstated: a slower scan makes the exchange pay earlier.
    link_bytes_per_s: of the link between two ranks, one way.
    shared_bytes_per_s: at which the exchange reads a rank's index pages.
    rank_s: of ranking a block of the rank's own for one (row, head).
    rank_pairs: (row, head) pairs with which that takes twice as long.
    """

    fixed_s: float = 7e-6
    scan_bytes_per_s: float = GFX950.hbm_bytes_per_s
    link_bytes_per_s: float = GFX950.fabric_link_bytes_per_s
    shared_bytes_per_s: float = GFX950.hbm_bytes_per_s
    rank_s: float = 0.0
    rank_pairs: int = 1


MODELLED_GFX950 = Costs()
MEASURED_H200 = Costs(10e-6, 2.9e12, 450e9, 2.1e12, 10e-9, 100)
"""Of the Triton kernels on two H200s, fitted to docs/measured_facts.md."""

NEVER = 2**31 - 1
"""A threshold that no batch reaches."""


@dataclass(frozen=True)
class Scan:
    """What a layer's index scan moves. page_bytes: an index page; query_bytes: one row and head."""

    page_bytes: int
    query_bytes: int
    topk: int = 16


@dataclass(frozen=True)
class Decision:
    """Whether a batch goes through the exchange, and why: `reason` is a phrase without numbers."""

    shared: bool
    reason: str
    threshold: int
    """Blocks from which a batch of so many requests and rows is shared."""


def exchange_bytes(shard: Shard, batch: Batch, scan: Scan) -> int:
    """Bytes over the busiest link in one direction: queries of a pusher, results for an owner.

    Results as candidates: no form has more where they matter.
    """
    rows = batch.rows * shard.heads_per_rank
    return TAGGED * rows * (scan.query_bytes + scan.topk * CANDIDATE_BYTES)


def threshold(shard: Shard, batch: Batch, scan: Scan, costs: Costs = MODELLED_GFX950) -> int:
    """Blocks a request from which sharing saves more than it costs.

        saved(B) = requests B page_bytes (1 / scan_bytes_per_s - 1 / (P shared_bytes_per_s))
                   - B / P rank_s (1 + rows heads / rank_pairs)
        cost     = fixed_s + exchange_bytes / link_bytes_per_s

    `batch.max_blocks` plays no part. At least one block a rank; NEVER where nothing is saved.
    """
    pairs = batch.rows * shard.heads
    a_byte = 1 / costs.scan_bytes_per_s - 1 / (shard.ranks * costs.shared_bytes_per_s)
    ranking = costs.rank_s * (1 + pairs / costs.rank_pairs) / shard.ranks
    a_block = batch.requests * scan.page_bytes * a_byte - ranking
    cost = costs.fixed_s + exchange_bytes(shard, batch, scan) / costs.link_bytes_per_s
    if a_block * NEVER <= cost:
        return NEVER
    return max(shard.ranks, ceil(cost / a_block))


def decide(
    shard: Shard,
    batch: Batch,
    scan: Scan,
    min_blocks: int | None = None,
    costs: Costs = MODELLED_GFX950,
) -> Decision:
    """Whether the batch is shared. `min_blocks` replaces the computed threshold."""
    if shard.ranks == 1:
        return Decision(False, "one rank", 0)
    if batch.rows == 0:
        return Decision(False, "no rows", 0)
    limit = threshold(shard, batch, scan, costs) if min_blocks is None else min_blocks
    if batch.max_blocks < limit:
        return Decision(False, "short", limit)
    return Decision(True, "long", limit)

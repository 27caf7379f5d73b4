"""Who scores which block, who owns which index head: ints only, the same on every rank.

    block b of a request   scored by rank b mod P, for all heads, as that rank's block b div P
    index head h           owned by the ranks that attend with it: heads / P heads a rank while P
                           divides heads, else P / heads ranks a head (tensor parallelism beyond
                           the KV heads), as vLLM shards K and V
    pusher of h            the first of its owners: its queries alone are scored, also for the
                           other owners, so that these select the same bits whatever they hold

A row of causal length n has nb = ceil(n / 128) blocks; only its newest may be partly filled.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.errors import check_int, expect


class Site(IntEnum):
    """Where an exchange can fail; the numbers are part of the error word."""

    QUERIES = 1
    """A peer's queries did not come."""
    RESULTS = 2
    """A peer's results did not come."""
    SHAPE = 3
    """A peer's message is of another batch or launch."""
    START = 4
    """A peer did not begin the launch."""


@dataclass(frozen=True)
class Shard:
    """One rank's share. `heads`: index heads of the model, over all ranks.

    Raises:
        TypeError, ValueError: a rank outside of 0..ranks-1; ranks and heads neither of which
            divides the other.
    """

    rank: int
    ranks: int
    heads: int

    def __post_init__(self) -> None:
        check_int("ranks", self.ranks, 1)
        check_int("heads", self.heads, 1)
        check_int("rank", self.rank, 0)
        if self.rank >= self.ranks:
            raise ValueError(expect("rank", f"0..{self.ranks - 1}", self.rank))
        if self.heads % self.ranks and self.ranks % self.heads:
            raise ValueError(
                expect("ranks", f"a divisor or multiple of {self.heads} index heads", self.ranks)
            )

    def of(self, rank: int) -> Shard:
        """The share of another rank of the same group."""
        return Shard(rank, self.ranks, self.heads)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, the next one first, so that not all of them write to one at a time."""
        return tuple((self.rank + i) % self.ranks for i in range(1, self.ranks))

    # --- heads ---

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.heads // self.ranks)

    @property
    def replicas(self) -> int:
        """Owners of each head."""
        return max(1, self.ranks // self.heads)

    @property
    def own_heads(self) -> range:
        """The heads that this rank selects for, in the order of its index queries."""
        first = self.rank // self.replicas * self.heads_per_rank
        return range(first, first + self.heads_per_rank)

    def owners(self, head: int) -> range:
        """The ranks that own `head`."""
        self._check_head(head)
        first = head // self.heads_per_rank * self.replicas
        return range(first, first + self.replicas)

    def pusher(self, head: int) -> int:
        """The owner whose queries every rank scores."""
        return self.owners(head)[0]

    @property
    def pushed_heads(self) -> range:
        """Heads whose queries this rank sends to all others; empty on a head's other owners."""
        return self.own_heads if self.rank % self.replicas == 0 else range(0)

    # --- blocks ---

    def block_rank(self, block: int) -> int:
        """The rank that scores logical block `block` of any request."""
        return block % self.ranks

    def owned_blocks(self, num_blocks: int) -> int:
        """How many of a row's `num_blocks` blocks this rank scores."""
        return max(0, -(-(num_blocks - self.rank) // self.ranks))

    def blocks(self, num_blocks: int) -> range:
        """Those blocks' logical ids, ascending: position i holds block i * ranks + rank."""
        return range(self.rank, max(self.rank, num_blocks), self.ranks)

    def slots(self, max_blocks: int) -> int:
        """Results that every rank reserves a row and head: the largest share, rank 0's."""
        return -(-max_blocks // self.ranks)

    def owned_keys(self, length: int) -> int:
        """Keys of a row of causal length `length` that lie in this rank's blocks.

        They are the first so many keys of the request whose blocks are `blocks(nb)`: all but the
        newest block are full.
        """
        num_blocks = -(-length // BLOCK_TOKENS)
        owned = self.owned_blocks(num_blocks)
        if num_blocks and self.block_rank(num_blocks - 1) == self.rank:
            return (owned - 1) * BLOCK_TOKENS + length - (num_blocks - 1) * BLOCK_TOKENS
        return owned * BLOCK_TOKENS

    def _check_head(self, head: int) -> None:
        if not 0 <= head < self.heads:
            raise ValueError(expect("head", f"0..{self.heads - 1}", head))

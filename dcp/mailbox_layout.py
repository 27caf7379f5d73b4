"""Bytes of the memory that the ranks exchange through; README.md: the protocol.

    mailbox   one a rank, written by all ranks, at the same address for its whole life
              errors | buffer 0 | buffer 1 | buffer 2 | buffer 3        launch g uses buffer g mod 4
    buffer    hello | queries | results                                 tagged 64-bit words
    state     one a rank, touched by that rank alone
              generation | error | arrivals | flags | keys

A tagged word holds a 32-bit payload (low) and the tag of its launch (high). Offsets depend on the
geometry alone, never on a batch, so that ranks that disagree about a batch do not write where
another rank does not expect it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dcp.plan import Batch, Results
from dcp.shard import Shard
from rocm_msa.errors import check_int, expect
from rocm_msa.layout import Layout, pack

WORD = 8
"""Bytes of a tagged word, of an error, of a flag."""
BUFFERS = 4
TAG_PERIOD = 1 << 31
"""Launches after which a tag comes again."""
SCRUB_WORDS = 1024
"""Words that a launch clears in the buffer that no rank touches; 256 threads, four each."""
MAX_WORKGROUPS = 2048
"""Flags of a rank; the grid of a launch is smaller."""
_LINE = 128
_PRIME = 0x01000193


def tag(generation: int) -> int:
    """High half of a word of launch `generation`, which counts from 1: never 0."""
    return generation % TAG_PERIOD | TAG_PERIOD


def digest(*facts: int) -> int:
    """32 bits of what all ranks of a launch must agree on: shapes, options, the layer."""
    value = 0x811C9DC5
    for fact in facts:
        for shift in range(0, 64, 8):
            value = (value ^ (fact >> shift & 0xFF)) * _PRIME & 0xFFFFFFFF
    return value


def launch_digest(
    batch: Batch, shard: Shard, topk: int, init_blocks: int, local_blocks: int, layer: int,
    results: Results,
) -> int:  # fmt: skip
    """What all ranks of a launch must have in common and the host knows, as an int32."""
    number = digest(
        batch.requests, batch.rows_per_request, batch.max_blocks, topk, init_blocks, local_blocks,
        layer, list(Results).index(results), shard.ranks, shard.heads,
    )  # fmt: skip
    return number - (1 << 32) if number >> 31 else number


@dataclass(frozen=True)
class Geometry:
    """Sizes that all ranks of a group share.

    Attributes:
        ranks, heads: of the group; index heads of the model.
        rows: most rows of a batch.
        slots: most blocks of a request that one rank scores.
        topk: blocks that are selected.
        query_words: 32-bit words of one query.
        result_words: most scores that a rank sends for one row and head; at least the 2 * topk
            words of its candidates.
    """

    ranks: int
    heads: int
    rows: int
    slots: int
    topk: int = 16
    query_words: int = 64
    result_words: int = 0

    def __post_init__(self) -> None:
        for name in ("ranks", "heads", "rows", "slots", "topk", "query_words"):
            check_int(name, getattr(self, name), 1)
        check_int("result_words", self.result_words, 0)
        if self.heads % self.ranks and self.ranks % self.heads:
            raise ValueError(
                expect("ranks", f"a divisor or multiple of {self.heads} index heads", self.ranks)
            )
        object.__setattr__(self, "result_words", max(self.result_words, 2 * self.topk))

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.heads // self.ranks)

    @cached_property
    def buffer(self) -> Layout:
        """Words of one launch. Its size is SCRUB_WORDS words times a power of two.

        hello    [ranks]: of each sender; payload: the launch's digest
        queries  [heads, rows, query_words]: of the pusher of each head
        results  [heads_per_rank, ranks, rows, result_words]: of each sender, for each own head
        """
        rows = self.rows * WORD
        sizes = [
            ("hello", self.ranks * WORD),
            ("queries", self.heads * rows * self.query_words),
            ("results", self.heads_per_rank * self.ranks * rows * self.result_words),
        ]
        packed = pack(sizes, align=_LINE)
        chunks = -(-packed.nbytes // (SCRUB_WORDS * WORD))
        return Layout(packed.regions, SCRUB_WORDS * WORD << (chunks - 1).bit_length())

    @cached_property
    def mailbox(self) -> Layout:
        """errors [ranks]: error words, of each sender; then the buffers."""
        sizes = [("errors", self.ranks * WORD)]
        sizes += [(f"buffer{i}", self.buffer.nbytes) for i in range(BUFFERS)]
        return pack(sizes, align=_LINE)

    @cached_property
    def state(self) -> Layout:
        """What a rank keeps for itself; all zero but the generation when it is made.

        generation  uint64: of the next launch, from 1
        error       uint64: the error word, 0 for none; sticky
        arrivals    uint32: workgroups that are done; 0 between launches
        flags       uint64 [MAX_WORKGROUPS]: the launch whose keys a workgroup has written
        keys        uint32 [heads, rows, slots]: order keys of the blocks that this rank scored
        """
        sizes = [
            ("generation", WORD),
            ("error", WORD),
            ("arrivals", WORD),
            ("flags", MAX_WORKGROUPS * WORD),
            ("keys", self.heads * self.rows * self.slots * 4),
        ]
        return pack(sizes, align=_LINE)

    @property
    def scrub_chunks(self) -> int:
        """A power of two: 4 times as many launches clear every word of all buffers once."""
        return self.buffer.nbytes // (SCRUB_WORDS * WORD)

    def check_tags(self) -> None:
        """ValueError when a word could outlive its tag's period."""
        if BUFFERS * (self.scrub_chunks + 1) >= TAG_PERIOD:
            raise ValueError(expect("mailbox", "fewer words", self.buffer.nbytes // WORD))


@dataclass(frozen=True)
class ErrorWord:
    """A fault as 64 bits: site 8 | peer 8 | rank 8 | 1 | generation 32, the highest first.

    rank found it; peer is whom it waited for or disagreed with; generation: the lower 32 bits.
    """

    site: int
    peer: int
    rank: int
    generation: int

    _SET = 1 << 32

    @property
    def word(self) -> int:
        """As an unsigned number; never 0."""
        high = self.site << 56 | self.peer << 48 | self.rank << 40
        return high | self._SET | self.generation & 0xFFFFFFFF

    @classmethod
    def parse(cls, word: int) -> ErrorWord | None:
        """Of a signed or unsigned 64-bit word; None for 0."""
        word &= (1 << 64) - 1
        if word == 0:
            return None
        return cls(word >> 56, word >> 48 & 0xFF, word >> 40 & 0xFF, word & 0xFFFFFFFF)

"""KV cache sizes and how many sequences fit. Computed only.

A token's K or V vector of one head takes `data + scales` bytes (NVFP4: head_dim/2 + head_dim/16,
FP8: head_dim, bf16: 2 head_dim). A rank keeps its own KV heads and the whole index key, so

    row (bytes of a block on a rank) = 128 · Σ layers (2 · heads_rank · vector) + index vector
    blocks  = KV memory // row;  usable = blocks - 1 (vLLM keeps block 0 for padding)
    sequences of a context = usable // ceil(context / 128)

Pure Python: no torch. Unless said otherwise a byte count is of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.outer_block import OuterBlockRow
from rocm_msa.cache.pages import index_page, main_page
from rocm_msa.config import BLOCK_TOKENS, ModelConfig, RankGeometry, RopeConfig
from rocm_msa.errors import ConfigError, Refusals, expect
from rocm_msa.layout import Layout

RESERVED_BLOCKS = 1
"""Blocks vLLM never gives to a request: block 0 stands for padding."""

MINIMAX_M3 = ModelConfig(
    hidden_size=6144,
    num_layers=60,
    q_heads=64,
    kv_heads=4,
    head_dim=128,
    rope=RopeConfig(theta=5e6, rotary_dim=64, original_max_position=524288, factor=2.0),
    rms_norm_eps=1e-6,
    vocab_size=200064,
    sparse_layers=(False,) * 3 + (True,) * 57,
    moe_layers=(False,) * 3 + (True,) * 57,
    index_heads=4,
    index_dim=128,
    block_tokens=128,
    topk_blocks=16,
    init_blocks=0,
    local_blocks=1,
    num_experts=128,
    experts_per_token=4,
    intermediate_size=3072,
    dense_intermediate_size=12288,
    shared_experts=1,
    routed_scaling_factor=2.0,
    swiglu_alpha=1.702,
    swiglu_beta=1.0,
    swiglu_limit=7.0,
)
"""The public geometry of MiniMax-M3 / M3.1, with YaRN to 1,048,576 tokens."""


@dataclass(frozen=True)
class Term:
    """One summand: `formula` in words with its numbers, `nbytes` their product in bytes."""

    name: str
    formula: str
    nbytes: int


@dataclass(frozen=True)
class CacheDTypes:
    """Dtypes of the caches. `dense` is that of the dense layers' main cache; None: as `main`."""

    main: CacheDType
    index: CacheDType
    dense: CacheDType | None = None

    @classmethod
    def parse(cls, main: str, index: str | None = None) -> CacheDTypes:
        """From vLLM's strings; an index dtype of None follows the main one."""
        return cls(CacheDType.parse(main), CacheDType.parse(index or main))

    @property
    def dense_main(self) -> CacheDType:
        return self.dense or self.main

    @property
    def name(self) -> str:
        """`main + index`, or one name for both; a deviating dense dtype comes first."""
        parts = [self.main.value]
        if self.index is not self.main or self.dense_main is not self.main:
            parts.append(self.index.value)
        if self.dense_main is not self.main:
            parts.insert(0, f"dense {self.dense_main.value}")
        return " + ".join(parts)


@dataclass(frozen=True)
class KVCache:
    """The caches of one model on `tp` ranks."""

    model: ModelConfig
    rank: RankGeometry
    dtypes: CacheDTypes

    @classmethod
    def of(cls, model: ModelConfig, dtypes: CacheDTypes, tp: int = 1) -> KVCache:
        """Raises ConfigError when the heads do not divide over `tp`."""
        return cls(model, model.shard(tp), dtypes)

    @property
    def row(self) -> Layout:
        """The outer-block row of one block on one rank, page by page (cache/outer_block.py)."""
        row = OuterBlockRow.of(
            self.model, self.rank, self.dtypes.main, self.dtypes.index, dense=self.dtypes.dense
        )
        return row.layout

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on one rank."""
        return self.row.nbytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token on one rank."""
        return self.block_bytes // BLOCK_TOKENS

    @property
    def total_token_bytes(self) -> int:
        """Bytes of one token over all ranks, replicas counted."""
        return self.token_bytes * self.rank.tp

    @property
    def once_main_token_bytes(self) -> int:
        """K and V of one token, every layer and head once, without the index: rank-free."""
        vectors = [
            (self.dtypes.main if sparse else self.dtypes.dense_main).vector_bytes(
                self.model.head_dim
            )
            for sparse in self.model.sparse_layers
        ]
        return 2 * self.model.kv_heads * sum(vectors)

    def terms(self) -> tuple[Term, ...]:
        """Bytes a token on one rank, term by term; a block is 128 times each."""
        out = []
        for kind, sparse in (("dense", False), ("sparse", True)):
            layers = sum(s is sparse for s in self.model.sparse_layers)
            dtype = self.dtypes.main if sparse else self.dtypes.dense_main
            page = main_page(self.rank.kv_heads, self.model.head_dim, dtype)
            heads = "1 KV head" if page.kv_heads == 1 else f"{page.kv_heads} KV heads"
            for region in page.head_layout:
                vector = region.nbytes // BLOCK_TOKENS
                name = f"{kind} layers, {_words(region.name)} ({dtype.value})"
                formula = f"{layers} layers × {heads} × {vector} B"
                out.append(Term(name, formula, layers * page.kv_heads * vector))
        page = index_page(self.model.index_dim, self.dtypes.index)
        layers = self.model.num_sparse_layers
        for region in page.head_layout:
            vector = region.nbytes // BLOCK_TOKENS
            name = f"index, {_words(region.name)} ({page.dtype.value})"
            out.append(Term(name, f"{layers} layers × 1 key head × {vector} B", layers * vector))
        return tuple(term for term in out if term.nbytes)

    def fit(self, kv_bytes: int, context: int) -> Fit:
        """What `kv_bytes` of KV memory on each rank hold.

        Raises:
            ValueError: a context that is not in 1..the positions of the RoPE table.
        """
        limit = self.model.rope.max_position
        if not 1 <= context <= limit:
            raise ValueError(expect("context", f"1..{limit} (the model's RoPE table)", context))
        blocks = max(0, kv_bytes) // self.block_bytes
        return Fit(context, blocks, -(-context // BLOCK_TOKENS))


@dataclass(frozen=True)
class Fit:
    """`blocks` allocated, and the blocks that one sequence of `context` tokens takes."""

    context: int
    blocks: int
    blocks_per_sequence: int

    @property
    def usable_blocks(self) -> int:
        return max(0, self.blocks - RESERVED_BLOCKS)

    @property
    def sequences(self) -> int:
        return self.usable_blocks // self.blocks_per_sequence

    @property
    def tokens(self) -> int:
        """Tokens that the usable blocks hold, over sequences of any length."""
        return self.usable_blocks * BLOCK_TOKENS


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU, in bytes. `reserve` is for activations, graphs and the runtime; `mono` for
    the weights that the mono kernel has a second time."""

    total: int
    utilization: float
    weights: int
    reserve: int = 0
    mono: int = 0

    def __post_init__(self) -> None:
        refusals = Refusals("cannot plan the memory")
        refusals.check(self.total > 0, expect("GPU memory", "> 0 bytes", self.total))
        refusals.check(
            0 < self.utilization <= 1,
            expect("gpu_memory_utilization", "in (0, 1]", self.utilization),
        )
        refusals.check(self.weights >= 0, expect("weights", ">= 0 bytes", self.weights))
        refusals.check(self.reserve >= 0, expect("reserve", ">= 0 bytes", self.reserve))
        refusals.check(self.mono >= 0, expect("mono", ">= 0 bytes", self.mono))
        refusals.raise_if_any()
        if self.kv_bytes <= 0:
            raise ConfigError(
                "no memory is left for the KV cache",
                [f"{term.name}: {term.nbytes / 2**30:,.1f} GiB" for term in self.terms()],
            )

    @property
    def kv_bytes(self) -> int:
        return int(self.total * self.utilization) - self.weights - self.mono - self.reserve

    def terms(self) -> tuple[Term, ...]:
        usable = int(self.total * self.utilization)
        again = Term("mono weights", "the mono layers' weights once more", -self.mono)
        return (
            Term("usable", f"{self.utilization:g} of {self.total / 2**30:,.1f} GiB", usable),
            Term("weights", "one rank's share", -self.weights),
            *([again] if self.mono else []),
            Term("reserve", "activations and runtime", -self.reserve),
            Term("KV cache", "what is left", self.kv_bytes),
        )


def _words(region: str) -> str:
    side, part = region.split("_")
    return f"{side.upper()} {part}"

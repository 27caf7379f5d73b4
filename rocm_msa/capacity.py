"""KV cache sizes, how many sequences fit, and the traffic the documents promise. Computed only.

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
from rocm_msa.cache.pages import index_page, main_page
from rocm_msa.config import BLOCK_TOKENS, ModelConfig, RankGeometry, RopeConfig
from rocm_msa.errors import ConfigError, Refusals, expect
from rocm_msa.layout import Layout, pack

RESERVED_BLOCKS = 1
"""Blocks vLLM never gives to a request: block 0 stands for padding."""

BF16_BYTES = 2
MX_GROUP = 32
"""Values an E8M0 scale byte of an MX format covers."""

WEIGHT_DTYPES = ("bf16", "mxfp8", "nvfp4", "mxfp4")

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
        """The outer-block row of one block on one rank: every layer's page, side by side.

        Main pages in layer order, then the index pages, as vLLM's block-outermost layout (BLHNC)
        places them. A draft model's pages would follow.
        """
        sizes = []
        for layer, sparse in enumerate(self.model.sparse_layers):
            dtype = self.dtypes.main if sparse else self.dtypes.dense_main
            page = main_page(self.rank.kv_heads, self.model.head_dim, dtype)
            sizes.append((f"layer {layer} main", page.page_bytes))
        page = index_page(self.model.index_dim, self.dtypes.index)
        for layer, sparse in enumerate(self.model.sparse_layers):
            if sparse:
                sizes.append((f"layer {layer} index", page.page_bytes))
        return pack(sizes)

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
    """Memory of one GPU, in bytes. `reserve` is for activations, graphs and the runtime."""

    total: int
    utilization: float
    weights: int
    reserve: int = 0

    def __post_init__(self) -> None:
        refusals = Refusals("cannot plan the memory")
        refusals.check(self.total > 0, expect("GPU memory", "> 0 bytes", self.total))
        refusals.check(
            0 < self.utilization <= 1,
            expect("gpu_memory_utilization", "in (0, 1]", self.utilization),
        )
        refusals.check(self.weights >= 0, expect("weights", ">= 0 bytes", self.weights))
        refusals.check(self.reserve >= 0, expect("reserve", ">= 0 bytes", self.reserve))
        refusals.raise_if_any()
        if self.kv_bytes <= 0:
            raise ConfigError(
                "no memory is left for the KV cache",
                [f"{term.name}: {term.nbytes / 2**30:,.1f} GiB" for term in self.terms()],
            )

    @property
    def kv_bytes(self) -> int:
        return int(self.total * self.utilization) - self.weights - self.reserve

    def terms(self) -> tuple[Term, ...]:
        usable = int(self.total * self.utilization)
        return (
            Term("usable", f"{self.utilization:g} of {self.total / 2**30:,.1f} GiB", usable),
            Term("weights", "one rank's share", -self.weights),
            Term("reserve", "activations and runtime", -self.reserve),
            Term("KV cache", "what is left", self.kv_bytes),
        )


@dataclass(frozen=True)
class Section:
    """A titled list of terms; `total` names their sum and is None where they do not add up."""

    title: str
    terms: tuple[Term, ...]
    total: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(term.nbytes for term in self.terms)


def explain(cache: KVCache) -> tuple[Section, ...]:
    """Every term of the cache, the decode reads and the prefill exchange, with its formula."""
    model, rank = cache.model, cache.rank
    tokens = BLOCK_TOKENS
    once = Term(
        "K and V of the whole model, once",
        "every layer and KV head, without the index",
        cache.once_main_token_bytes,
    )
    fp8_cache = KVCache(model, rank, CacheDTypes(CacheDType.FP8, CacheDType.FP8))
    fp8 = Term("the same in FP8", "for comparison", fp8_cache.once_main_token_bytes)
    row = Term(
        "row: one block on one rank",
        f"{cache.token_bytes:,} B × {tokens} tokens",
        cache.block_bytes,
    )
    everywhere = Term(
        f"one token on all {rank.tp} ranks",
        f"{cache.token_bytes:,} B × {rank.tp}; index and shared heads are copies",
        cache.total_token_bytes,
    )
    return (
        Section("Bytes a token, one rank", cache.terms(), "a token on one rank"),
        Section("From these", (row, everywhere, once, fp8)),
        Section("Decode reads, whole model, a layer", decode_reads(model, cache.dtypes)),
        *(
            (
                Section(
                    "Prefill exchange, plain (bytes sent a token, layer and GPU)",
                    all_reduce_bytes(model, rank.tp),
                    "without sequence parallelism",
                ),
                Section(
                    "Prefill exchange, sequence parallel (the same unit)",
                    sequence_parallel_bytes(model, rank.tp),
                    "with sequence parallelism",
                ),
            )
            if rank.tp > 1
            else ()
        ),
    )


def decode_reads(model: ModelConfig, dtypes: CacheDTypes) -> tuple[Term, ...]:
    """Bytes one decode row reads a layer: the scan, what it replaces, and what follows it."""
    index = dtypes.index.vector_bytes(model.index_dim)
    fp8 = CacheDType.FP8.vector_bytes(model.head_dim)
    vector = dtypes.main.vector_bytes(model.head_dim)
    selected = model.topk_blocks * BLOCK_TOKENS
    return (
        Term(
            "index scan, a token of context",
            f"1 index key of {index} B ({dtypes.index.value})",
            index,
        ),
        Term(
            "dense FP8 K/V, a token of context",
            f"{model.kv_heads} heads × 2 × {fp8} B, for comparison",
            2 * model.kv_heads * fp8,
        ),
        Term(
            "selected K/V, a row",
            f"{selected:,} tokens × {model.kv_heads} heads × 2 × {vector} B ({dtypes.main.value})",
            selected * 2 * model.kv_heads * vector,
        ),
    )


def all_reduce_bytes(model: ModelConfig, tp: int) -> tuple[Term, ...]:
    """Two ring all-reduces of the bf16 hidden state: bytes sent a token, layer and GPU."""
    nbytes = 2 * (tp - 1) * model.hidden_size * BF16_BYTES // tp
    formula = f"2 × {tp - 1}/{tp} × {model.hidden_size} × 2 B"
    return tuple(
        Term(f"ring all-reduce after {where}", formula, nbytes)
        for where in ("attention", "the MoE")
    )


def sequence_parallel_bytes(model: ModelConfig, tp: int) -> tuple[Term, ...]:
    """Sequence-parallel exchanges: bytes sent a token, layer and GPU."""

    def sent(name: str, width: int, mxfp8: bool) -> Term:
        share = f"{tp - 1}/{tp} × {width}"
        if not mxfp8:
            return Term(f"bf16 {name}", f"{share} × 2 B", (tp - 1) * width * BF16_BYTES // tp)
        nbytes = (tp - 1) * width * (MX_GROUP + 1) // (tp * MX_GROUP)
        return Term(f"MXFP8 {name}", f"{share} × {MX_GROUP + 1}/{MX_GROUP} B", nbytes)

    attended = model.q_heads * model.head_dim // tp
    return (
        sent("all-gather before QKV", model.hidden_size, True),
        sent("all-to-all of the attention output", attended, True),
        sent("all-gather before the MoE", model.hidden_size, True),
        sent("reduce-scatter of the MoE output", model.hidden_size, False),
    )


def weight_terms(model: ModelConfig, rank: RankGeometry, dtype: str) -> tuple[Term, ...]:
    """Estimate of one rank's text weights from the config; norms and biases are left out.

    `nvfp4`: routed experts NVFP4, other linears MXFP8. `mxfp4`: experts MXFP4, the rest bf16.
    Embeddings, head and router stay bf16 in every layout.

    Raises:
        ValueError: a dtype that is not in `WEIGHT_DTYPES`.
    """
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(expect("weight dtype", f"one of {list(WEIGHT_DTYPES)}", repr(dtype)))
    linear = {"bf16": "bf16", "mxfp8": "mxfp8", "nvfp4": "mxfp8", "mxfp4": "bf16"}[dtype]
    shared = "mxfp4" if dtype == "mxfp4" else linear
    hidden, tp = model.hidden_size, rank.tp
    moe = sum(model.moe_layers)
    dense = model.num_layers - moe
    heads = 2 * rank.q_heads + 2 * rank.kv_heads
    attention = model.num_layers * hidden * heads * model.head_dim
    index = model.num_sparse_layers * hidden * (rank.index_heads + 1) * model.index_dim
    expert = 3 * hidden * model.intermediate_size // tp
    return (
        _weights("embeddings and head", 2 * model.vocab_size * hidden // tp, "bf16"),
        _weights("attention projections", attention, linear),
        _weights("index projections", index, linear),
        _weights("dense MLPs", dense * 3 * hidden * model.dense_intermediate_size // tp, linear),
        _weights("routers", moe * hidden * model.num_experts, "bf16"),
        _weights("routed experts", moe * model.num_experts * expert, dtype),
        _weights("shared experts", moe * model.shared_experts * expert, shared),
    )


_WEIGHT_BITS = {"bf16": 16.0, "mxfp8": 8.25, "nvfp4": 4.5, "mxfp4": 4.25}
"""Bits a value with its share of the block scale."""


def _weights(name: str, values: int, dtype: str) -> Term:
    bits = _WEIGHT_BITS[dtype]
    formula = f"{values / 1e9:,.2f} G values × {bits / 8:g} B ({dtype})"
    return Term(name, formula, int(values * bits / 8))


def _words(region: str) -> str:
    side, part = region.split("_")
    return f"{side.upper()} {part}"

"""Every term behind the figures, in titled sections, for `rocm-msa capacity --explain`."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.capacity.caches import CacheDTypes, KVCache, Term
from rocm_msa.capacity.traffic import all_reduce_bytes, decode_reads, sequence_parallel_bytes
from rocm_msa.config import BLOCK_TOKENS


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

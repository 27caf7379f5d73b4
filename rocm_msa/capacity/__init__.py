"""KV cache sizes, how many sequences fit, and the traffic the documents promise. Computed only."""

from rocm_msa.capacity.caches import (
    MINIMAX_M3,
    RESERVED_BLOCKS,
    CacheDTypes,
    Fit,
    KVCache,
    Memory,
    Term,
)
from rocm_msa.capacity.report import Section, explain
from rocm_msa.capacity.traffic import (
    WEIGHT_DTYPES,
    all_reduce_bytes,
    decode_reads,
    sequence_parallel_bytes,
    weight_terms,
)

__all__ = [
    "MINIMAX_M3",
    "RESERVED_BLOCKS",
    "WEIGHT_DTYPES",
    "CacheDTypes",
    "Fit",
    "KVCache",
    "Memory",
    "Section",
    "Term",
    "all_reduce_bytes",
    "decode_reads",
    "explain",
    "sequence_parallel_bytes",
    "weight_terms",
]

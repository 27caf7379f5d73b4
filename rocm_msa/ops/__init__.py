"""Public ops. Each has one folder: `api.py` is the contract, `reference.py` the PyTorch reference.

Every op takes `backend=None | "reference" | "triton" | "flydsl"`; None chooses and logs why.
"""

from rocm_msa.ops.block_topk.api import block_topk
from rocm_msa.ops.dense_attention.api import dense_attention
from rocm_msa.ops.index_score_decode.api import index_score_decode
from rocm_msa.ops.index_score_prefill.api import index_score_prefill
from rocm_msa.ops.qkv_insert.api import Heads, Norms, qkv_insert
from rocm_msa.ops.select_decode import select_decode
from rocm_msa.ops.sparse_decode.api import sparse_decode
from rocm_msa.ops.sparse_prefill.api import sparse_prefill

__all__ = [
    "Heads",
    "Norms",
    "block_topk",
    "dense_attention",
    "index_score_decode",
    "index_score_prefill",
    "qkv_insert",
    "select_decode",
    "sparse_decode",
    "sparse_prefill",
]

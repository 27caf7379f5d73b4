"""sparse_prefill on gfx950, by page: see ops/flydsl_by_page.py.

Refused: what sparse_decode refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rocm_msa.ops import flydsl_attend as attend
from rocm_msa.ops import flydsl_by_page as by_page


def builds(config) -> list[by_page.Build]:
    """The kernels that serving `config` (aot.ServingConfig) launches; none for what is refused."""
    if not attend.serves(config):
        return []
    return by_page.kernel_builds(config.main_dtype, config.dtype, config.topk)


def needs(q, main_cache, block_ids, *_: Any, out=None, **__: Any) -> Sequence[by_page.Build]:
    """The builds that `run` launches. Raises NotImplementedError for what is refused."""
    attend.check_call("sparse_prefill", q, main_cache, block_ids, out)
    name = attend.dtype_name(q.dtype)
    return by_page.kernel_builds(main_cache.dtype, name, block_ids.shape[-1])


def run(
    q,
    main_cache,
    block_ids,
    block_table,
    cu_seqlens_q,
    seq_lens,
    sm_scale,
    out=None,
    builds=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out in q's dtype, lse); see api.py."""
    builds = builds or needs(q, main_cache, block_ids, out=out)
    return by_page.attend_varlen(
        builds, q, main_cache, block_ids, block_table, cu_seqlens_q, seq_lens, sm_scale, out
    )


compile_build = by_page.compile_build

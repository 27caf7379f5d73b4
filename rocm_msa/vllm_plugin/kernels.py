"""Compiled kernels at start-up: on gfx950 they are loaded before anything is served, or it is said
why not and how to build them. Elsewhere nothing happens."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from rocm_msa import aot, launcher
from rocm_msa.ops import dispatch
from rocm_msa.vllm_plugin import metrics

if TYPE_CHECKING:
    from rocm_msa.vllm_plugin.verify import Serving

logger = logging.getLogger("vllm.rocm_msa")

SPARSE_OPS = (
    "qkv_insert",
    "index_score_decode",
    "index_score_prefill",
    "block_topk",
    "sparse_decode",
    "sparse_prefill",
)
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def start(serving: Serving, dtype: torch.dtype) -> None:
    """Load the kernels for the current device, and begin to export what is counted.

    Raises:
        RuntimeError: kernels that cannot be used or are missing, when the options ask for them:
            `code_objects` names a folder, or `backend` is flydsl. Else that is a warning, and the
            ops choose Triton. With backend flydsl also, anywhere, an op that has none at all.
    """
    metrics.start()
    options = serving.options
    if options.backend == "flydsl":
        _check_ops(serving)
    if torch.version.hip is None or not torch.cuda.is_available():
        return
    device = torch.device("cuda", torch.cuda.current_device())
    asked_for = options.code_objects is not None or options.backend == "flydsl"
    try:
        loaded = launcher.start(options.code_objects, device)
        missing = loaded.missing(aot.builds(_config(serving, dtype)))
        if missing:
            raise RuntimeError(f"{loaded.directory} lacks {', '.join(missing)}")
    except RuntimeError as error:
        text = f"compiled kernels: {error}; to build them: {launcher.BUILD_COMMAND}"
        if asked_for:
            raise RuntimeError(text) from error
        logger.warning("%s. The ops without them run on Triton", text)


def _check_ops(serving: Serving) -> None:
    ops = SPARSE_OPS + ("dense_attention",) * (serving.model.num_dense_layers > 0)
    lacking = [op for op in ops if not dispatch.flydsl_run(op).exists]
    if lacking:
        raise RuntimeError(
            f"backend flydsl: {', '.join(lacking)} has no FlyDSL kernels; leave the backend out, "
            "then each op takes the first that it has"
        )


def _config(serving: Serving, dtype: torch.dtype) -> aot.ServingConfig:
    return aot.ServingConfig.of(
        serving.model, serving.rank.tp, serving.main_dtype, serving.index_dtype, _DTYPES[dtype]
    )

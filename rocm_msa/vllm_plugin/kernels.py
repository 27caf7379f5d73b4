"""Kernels at start-up, on GPUs: those compiled ahead are loaded before anything is served, or it is
said why not and how to build them; what Triton will run is compiled once the caches are there."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rocm_msa import aot, launcher
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.ops import dispatch
from rocm_msa.ops.flydsl_attend import scales_and_table
from rocm_msa.ops.flydsl_host import keys_of
from rocm_msa.vllm_plugin import emulated, metrics

if TYPE_CHECKING:
    from rocm_msa.vllm_plugin.attention import MsaAttention
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
    if options.backend == emulated.BACKEND:
        emulated.start(serving, config_of(serving, dtype))
        return
    if torch.version.hip is None or not torch.cuda.is_available():
        return
    device = torch.device("cuda", torch.cuda.current_device())
    asked_for = options.code_objects is not None or options.backend == "flydsl"
    try:
        loaded = launcher.start(options.code_objects, device)
        missing = _missing(loaded, serving, dtype)
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


class WarmUp:
    """When the last cache of the model has got its memory, everything that a step would otherwise
    do once: compiles what Triton will run, uploads the tables of compiled kernels.

    vLLM may take the caches away again and give others, as after the measurement of graphs.

    Args:
        layers: the attention layers; each calls `bound` or `released` with its name, and for its
            index cache.
    """

    def __init__(self, serving: Serving, vllm_config: Any, layers: Sequence[MsaAttention]) -> None:
        self.serving, self.layers = serving, layers
        self.dtype = vllm_config.model_config.dtype
        speculative = vllm_config.speculative_config
        self.rows = {1, 1 + (speculative.num_speculative_tokens if speculative else 0)}
        self.requests = vllm_config.scheduler_config.max_num_seqs
        self.tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.max_blocks = -(-vllm_config.model_config.max_model_len // BLOCK_TOKENS)
        self._waiting = {layer.layer_name for layer in layers}
        self._waiting |= {layer.index_cache.layer_name for layer in layers if layer.sparse}

    def released(self, name: str) -> None:
        """The cache of layer `name` has lost its memory."""
        self._waiting.add(name)

    def bound(self, name: str) -> None:
        """The cache of layer `name` has its memory; at the last one, warm up."""
        if name in self._waiting:
            self._waiting.remove(name)
            if not self._waiting:
                self._run()
                metrics.serving_begins()

    def _run(self) -> None:
        self._upload_tables()
        self._prepare_exchange()
        needed = self._needed()
        if not needed:
            return
        from rocm_msa.ops import triton_warmup

        model = self.serving.model
        for layer in needed:
            config = triton_warmup.Config(
                heads=layer.heads,
                dtype=self.dtype,
                max_blocks=self.max_blocks,
                decode=[(n, r) for n in _steps(self.requests, 32, 256) for r in sorted(self.rows)],
                prefill=_steps(self.tokens, 16, 1024),
                topk=model.topk_blocks,
                init_blocks=model.init_blocks,
                local_blocks=model.local_blocks,
            )
            kind = "sparse" if layer.sparse else "dense"
            index_cache = layer.index_cache.cache if layer.sparse else None
            new = triton_warmup.warmup(config, layer.cache, index_cache)
            logger.info("warm-up: %d Triton kernels compiled for the %s layers", new, kind)

    def _upload_tables(self) -> None:
        """The NVFP4 tables of compiled kernels, which nobody may upload into a captured graph."""
        backend = self.serving.options.backend
        if not self.layers or backend not in (None, "flydsl", emulated.BACKEND):
            return
        device = self.layers[0].cache.pages.device
        if backend != emulated.BACKEND and launcher.active(device) is None:
            return
        for layer in self.layers:
            scales_and_table(layer.cache, device)
            if layer.sparse:
                keys_of(layer.index_cache.cache)

    def _prepare_exchange(self) -> None:
        """The indexer's exchange between GPUs, where it takes part: whoever compiled it in a step
        would be late for the others."""
        sparse = [layer for layer in self.layers if layer.sparse and layer.decode_cp is not None]
        if not sparse or sparse[0].index_cache.cache.pages.device.type != "cuda":
            return
        done = sparse[0].decode_cp.prepare(sparse[0].index_cache.cache, self.dtype)
        logger.info("warm-up: the indexer's exchange is prepared for %d sizes of batches", done)

    def _needed(self) -> list[MsaAttention]:
        """One layer of each kind that runs on Triton; none where nothing does."""
        if self.serving.options.backend not in (None, "triton") or not self.layers:
            return []
        device = self.layers[0].cache.pages.device
        if device.type != "cuda" or importlib.util.find_spec("triton") is None:
            return []
        kinds = {layer.sparse: layer for layer in self.layers}
        loaded = launcher.active(device) if self.serving.options.backend is None else None
        if loaded is not None and not _missing(loaded, self.serving, self.dtype):
            kinds.pop(True, None)  # sparse layers have compiled kernels
        return list(kinds.values())


def _steps(most: int, *sizes: int) -> list[int]:
    """1 or more sizes up to `most`, which is one of them."""
    return sorted({1, most, *(size for size in sizes if size < most)})


def _missing(loaded: Any, serving: Serving, dtype: torch.dtype) -> list[str]:
    """Kernels of the configuration that a loaded folder lacks."""
    return loaded.missing(aot.builds(config_of(serving, dtype)))


def config_of(serving: Serving, dtype: torch.dtype) -> aot.ServingConfig:
    """What the compiled kernels are chosen by."""
    mono = serving.mono
    return aot.ServingConfig.of(
        serving.model,
        serving.rank.tp,
        serving.main_dtype,
        serving.index_dtype,
        _DTYPES[dtype],
        mono and (mono.attention_format, mono.routed_format, mono.shared_format),
    )

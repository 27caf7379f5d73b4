"""Refuse, before any worker starts, every configuration that would not be served as asked.

`resolve` turns a VllmConfig into the frozen `Serving` description that the layers are built from;
all reasons against a configuration come in one error.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_msa import kernel_manifest, launcher
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.pages import Page, index_page, main_page
from rocm_msa.config import BLOCK_TOKENS, ModelConfig, RankGeometry
from rocm_msa.errors import ConfigError, Refusals, expect
from rocm_msa.ops.dispatch import CHOICES
from rocm_msa.vllm_plugin import compat, decode_cp, emulated, graph_config, mono_config
from rocm_msa.vllm_plugin.nixl import CONNECTOR
from rocm_msa.vllm_plugin.nixl.options import TransferOptions

if TYPE_CHECKING:
    from mono_kernel.shapes import Shape

logger = logging.getLogger("vllm.rocm_msa")

OPTIONS_KEY = "rocm_msa"
"""`--additional-config '{"rocm_msa": {...}}'`: the keys are the fields of `Options`."""


@dataclass(frozen=True)
class Options:
    """What `--additional-config` can set.

    backend: backend of all ops, None lets each op choose; "emulated": docs/emulated.md.
    code_objects: folder of `rocm-msa compile`, None for the one in the package; gfx950 only.
    indexer_decode_cp: same as the attention-config flag, for the Python API.
    indexer_decode_cp_min_blocks: blocks from which decode batches are shared, None computes them.
    mono: decode steps of few rows run each sparse layer as one kernel (docs/mono.md).
    """

    backend: str | None = None
    code_objects: str | None = None
    indexer_decode_cp: bool = False
    indexer_decode_cp_min_blocks: int | None = None
    mono: bool = False


@dataclass(frozen=True)
class Serving:
    """What is served: geometry, cache dtypes and options of one rank.

    decode_cp: whether the ranks share the index scan of decode rows, however that was asked for.
    mono: a rank's share of a layer for the mono kernel, where that was asked for.
    """

    model: ModelConfig
    rank: RankGeometry
    main_dtype: CacheDType
    index_dtype: CacheDType
    options: Options
    decode_cp: bool = False
    mono: Shape | None = None

    @property
    def main_page(self) -> Page:
        return main_page(self.rank.kv_heads, self.model.head_dim, self.main_dtype)

    @property
    def index_page(self) -> Page:
        return index_page(self.model.index_dim, self.index_dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on one rank: every layer's pages."""
        main = self.model.num_layers * self.main_page.page_bytes
        return main + self.model.num_sparse_layers * self.index_page.page_bytes

    def describe(self, num_blocks: int) -> str:
        """The line that is logged once the caches exist."""
        model = self.model
        return (
            f"rocm-msa serves {model.num_sparse_layers} sparse + {model.num_dense_layers} dense "
            f"attention layers, TP {self.rank.tp}; main cache {self.main_dtype.value} "
            f"({self.main_page.page_bytes} B a page and layer), index cache "
            f"{self.index_dtype.value} ({self.index_page.page_bytes} B a page and layer), "
            f"{self.block_bytes} B a block and rank; capacity {num_blocks * BLOCK_TOKENS:,} tokens "
            f"in {num_blocks:,} blocks; ops on backend {self.options.backend or 'of their choice'}"
        )


_OWN_ATTENTION = ("eagle", "eagle3", "draft_model", "dflash", "dspark")
"""Methods whose drafter has layers of vLLM's attention."""


def resolve(vllm_config: Any) -> Serving:
    """Read and check a VllmConfig.

    Raises:
        ConfigError: with all reasons.
    """
    refusals = Refusals("rocm-msa cannot serve this configuration")
    model = rank = None
    try:
        model = ModelConfig.from_hf(vllm_config.model_config.hf_config)
        rank = model.shard(vllm_config.parallel_config.tensor_parallel_size)
    except ConfigError as error:
        refusals.reasons += error.reasons
    options = _options(vllm_config, refusals)
    main_dtype = _dtype("--kv-cache-dtype", compat.cache_dtype_name(vllm_config), refusals)
    index_dtype = _dtype("indexer_kv_dtype", compat.indexer_dtype_name(vllm_config), refusals)
    _check_engine(vllm_config, options, refusals)
    _check_drafter(vllm_config, main_dtype, refusals)
    decode_cp.check_config(vllm_config, options, index_dtype, refusals)
    _check_quantization(vllm_config, refusals)
    graph_config.check_config(vllm_config, options, refusals)
    if rank is not None:
        share = decode_cp.asked_for(vllm_config, options)
        dtypes = (main_dtype, index_dtype)
        emulated.check_config(vllm_config, options, model, dtypes, share, refusals)
    shape = None
    if model is not None:
        shape = mono_config.check(vllm_config, options, model, refusals)
        length = vllm_config.model_config.max_model_len
        refusals.check(
            length <= model.rope.max_position,
            f"--max-model-len: expected <= {model.rope.max_position} positions that the RoPE table "
            f"covers, got {length}; for longer contexts set YaRN in text_config.rope_scaling (for "
            f'example --hf-overrides \'{{"text_config": {{"rope_scaling": {{"rope_type": '
            f'"yarn", "factor": 2.0, "original_max_position_embeddings": '
            f"{model.rope.original_max_position}}}}}}}')",
        )
    refusals.raise_if_any()
    asked = decode_cp.asked_for(vllm_config, options)
    return Serving(model, rank, main_dtype, index_dtype, options, asked, shape)


def _dtype(flag: str, name: str, refusals: Refusals) -> CacheDType:
    try:
        return CacheDType.parse(name)
    except ValueError as error:
        refusals.check(False, f"{flag}: {error}")
        return CacheDType.BF16


def _options(vllm_config: Any, refusals: Refusals) -> Options:
    additional = vllm_config.additional_config
    given = additional.get(OPTIONS_KEY, {}) if isinstance(additional, dict) else {}
    if not isinstance(given, dict):
        refusals.check(False, expect(f"additional_config.{OPTIONS_KEY}", "a dict", repr(given)))
        return Options()
    known = {f.name for f in fields(Options)}
    for key in sorted(set(given) - known):
        refusals.check(
            False, f"additional_config.{OPTIONS_KEY}.{key}: unknown key, known: {sorted(known)}"
        )
    options = Options(**{k: v for k, v in given.items() if k in known})
    refusals.check(
        options.backend is None or options.backend in CHOICES,
        expect(f"additional_config.{OPTIONS_KEY}.backend", f"one of {CHOICES}", options.backend),
    )
    _check_code_objects(options.code_objects, refusals)
    for key in ("indexer_decode_cp", "mono"):
        value = getattr(options, key)
        name = f"additional_config.{OPTIONS_KEY}.{key}"
        refusals.check(isinstance(value, bool), expect(name, "a bool", value))
    return options


def _check_code_objects(folder: object, refusals: Refusals) -> None:
    """A folder that is named must hold whole kernels, of these sources, for gfx950."""
    name = f"additional_config.{OPTIONS_KEY}.code_objects"
    if folder is None:
        return
    if refusals.check(isinstance(folder, str), expect(name, "a folder", repr(folder))):
        try:
            launcher.check(Path(folder))
        except kernel_manifest.ManifestError as error:
            refusals.check(False, f"{name}: {error}")


def _check_engine(vllm_config: Any, options: Options, refusals: Refusals) -> None:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    attention = vllm_config.attention_config
    check = refusals.check
    check(
        cache.block_size == BLOCK_TOKENS,
        f"--block-size: expected {BLOCK_TOKENS} (one sparse block a page), got {cache.block_size}",
    )
    layouts = [layout.name for layout in compat.cache_layouts()]
    asked = compat.layout_asked_for()
    check(
        asked is None or asked in layouts,
        expect("VLLM_KV_CACHE_LAYOUT", f"one of {layouts} or unset", repr(asked)),
    )
    check(
        not cache.kv_cache_dtype_skip_layers,
        "--kv-cache-dtype-skip-layers: every layer has the same main cache dtype, got "
        f"{cache.kv_cache_dtype_skip_layers}",
    )
    check(
        not compat.upstream_indexer_cp_requested(vllm_config),
        "minimax_m3_indexer_cp: vLLM's own indexer context parallelism does not apply to these "
        "layers",
    )
    check(
        attention.backend is None and not attention.backend_per_kind,
        "--attention-backend: these layers bring their own backend, it cannot be chosen",
    )
    check(
        getattr(attention, "hisparse_config", None) is None,
        "hisparse_config: not supported with these caches",
    )
    for name, flag in (
        ("pipeline_parallel_size", "--pipeline-parallel-size"),
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        size = getattr(parallel, name, 1)
        check(size == 1, f"{flag}: expected 1, got {size}")
    check(
        not compat.aiter_asked_for_and_missing(),
        "VLLM_ROCM_USE_AITER: the package aiter is not installed, so vLLM would pass over its "
        "kernels; install it (AMD's image of vLLM holds it) or unset the variable",
    )
    check(not parallel.enable_dbo, "--enable-dbo: not supported with these layers")
    check(vllm_config.lora_config is None, "--enable-lora: not supported with these layers")
    transfer = compat.kv_connector_options(vllm_config, CONNECTOR)
    if transfer is not None:
        try:
            TransferOptions.read(transfer)
        except ConfigError as error:
            refusals.reasons += error.reasons
    if vllm_config.device_config.device_type == "cpu":
        check(
            not parallel.enable_expert_parallel,
            "--enable-expert-parallel: not supported on the CPU",
        )


def _check_drafter(vllm_config: Any, main_dtype: CacheDType | None, refusals: Refusals) -> None:
    """A drafter's attention is one of vLLM's; none of those for ROCm and the CPU knows NVFP4. On
    ROCm the worker would end, on the CPU the cache would be taken for FP8."""
    drafter = vllm_config.speculative_config
    own = drafter is not None and drafter.method in _OWN_ATTENTION
    if not own or main_dtype is not CacheDType.NVFP4:
        return
    refusals.check(
        drafter.kv_cache_dtype not in (None, "nvfp4"),
        expect(
            "speculative_config.kv_cache_dtype",
            "a dtype of the drafter's attention, such as 'auto' (bf16)",
            f"{drafter.kv_cache_dtype!r}, which means nvfp4",
        ),
    )


def _check_quantization(vllm_config: Any, refusals: Refusals) -> None:
    """`--quantization-config` adds to a quantised checkpoint; vLLM passes over it otherwise."""
    model = vllm_config.model_config
    if model.quantization_config is None:
        return
    if vllm_config.device_config.device_type == "cpu":
        logger.warning(
            "rocm-msa: --quantization-config has no effect on the CPU: weights are dequantised "
            "while loading"
        )
        return
    refusals.check(
        model.quantization is not None,
        "--quantization-config: the checkpoint is not quantised and no --quantization is given, "
        "so vLLM would not apply it",
    )


def check_checkpoint(vllm_config: Any) -> None:
    """Headers and sizes of a local checkpoint's safetensors files.

    Hub names, other file kinds and dummy weights are left to vLLM.
    """
    path = Path(vllm_config.model_config.model)
    if vllm_config.load_config.load_format != "dummy" and any(path.glob("*.safetensors")):
        from rocm_msa.checkpoint.read import open_checkpoint

        open_checkpoint(path)


def config_hook(previous: type | None) -> type:
    """The class vLLM asks to verify a VllmConfig of our architectures, in the front process.

    `previous` is the hook that stood in vLLM's table, called first.
    """
    from vllm.model_executor.models.config import VerifyAndUpdateConfig

    if previous is not None and getattr(previous, "is_rocm_msa", False):
        return previous

    class RocmMsaConfig(VerifyAndUpdateConfig):
        is_rocm_msa = True

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            if previous is not None:
                previous.verify_and_update_config(vllm_config)
            serving = resolve(vllm_config)
            check_checkpoint(vllm_config)
            graph_config.settle(vllm_config, serving.options)

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            if previous is not None:
                previous.verify_and_update_model_config(model_config)

    return RocmMsaConfig

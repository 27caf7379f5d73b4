"""Backend "emulated": the engine on the CPU, every op that has a gfx950 kernel in the emulator.

    --additional-config '{"rocm_msa": {"backend": "emulated"}}'

Each tensor-parallel rank is a process with an emulated GPU of its own. Ops without a gfx950 kernel
(dense_attention) take their reference, which is said at the start and counted; what has one never
falls back. rocm_msa.emulated, and with it the emulator, is imported only here and only when the
option asks for it (docs/emulated.md).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rocm_msa import aot, launcher
from rocm_msa.errors import Refusals, expect
from rocm_msa.ops import dispatch
from rocm_msa.vllm_plugin import metrics

if TYPE_CHECKING:
    from dcp.api import Exchange
    from dcp.plan import Batch
    from mono_kernel.runner import MonoRunner
    from mono_kernel.shapes import Shape
    from rocm_msa.cache.dtype import CacheDType
    from rocm_msa.config import ModelConfig
    from rocm_msa.vllm_plugin.verify import Options, Serving

logger = logging.getLogger("vllm.rocm_msa")

BACKEND = dispatch.EMULATED
_OPTION = "additional_config.rocm_msa.backend"
_OPS, _EXCHANGE = "rocm_msa.ops.", "dcp.exchange_gfx950"
_GRID = 4
"""Workgroups of an exchange launch: any number gives the same selection, few are quicker here."""
_MONO_GRID = 8
"""Likewise of the mono layer's, with the same bits."""


def _tally(counter: str) -> Callable[[], Mapping[tuple[str, ...], int]]:
    def source() -> Mapping[tuple[str, ...], int]:
        from rocm_msa import emulated

        return getattr(emulated.tally, counter)

    return source


_COUNTS = (
    metrics.Count(
        "emulated_launches",
        "Launches of gfx950 kernels in the emulator.",
        ("kernel",),
        _tally("launches"),
    ),
    metrics.Count(
        "emulated_instructions",
        "Wave-instructions that the emulator ran, polling left out.",
        ("kernel",),
        _tally("instructions"),
    ),
    metrics.Count(
        "emulated_bytes",
        "Bytes of global memory that the lanes of emulated kernels asked for.",
        ("kernel", "way"),
        _tally("nbytes"),
    ),
)


def check_config(
    vllm_config: Any,
    options: Options,
    model: ModelConfig,
    dtypes: tuple[CacheDType, CacheDType],
    share_scan: bool,
    refusals: Refusals,
) -> None:
    """Refuse what would not run in the emulator as asked; nothing for other backends.

    Args:
        dtypes: of the main and the index cache.
        share_scan: whether the ranks share the index scan (indexer_decode_cp).
    """
    if options.backend != BACKEND:
        return
    device = vllm_config.device_config.device_type
    name = f"{_OPTION} {BACKEND!r}"
    refusals.check(
        device == "cpu", f"{name}: " + expect("device", "cpu (vLLM's CPU build)", device)
    )
    try:
        from rocm_msa import emulated
    except ImportError as error:
        refusals.check(False, f"{name}: {error}; pip install 'rocm-msa[emulator,flydsl]'")
        return
    for fault in emulated.faults(options.code_objects):
        refusals.check(False, f"{name}: {fault}")
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    ranks = vllm_config.parallel_config.tensor_parallel_size
    try:
        short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]
        config = aot.ServingConfig.of(model, ranks, *dtypes, short)
    except (KeyError, ValueError):
        return  # refused for its own reasons
    modules = [module for module in aot.MODULES if module.startswith(_OPS)]
    for module in modules + [_EXCHANGE] * (share_scan and ranks > 1):
        if not importlib.import_module(module).builds(config):
            what = "the exchange" if module == _EXCHANGE else module.split(".")[-2]
            refusals.check(
                False,
                f"{name}: {what} has no gfx950 kernel for --dtype {dtype}, {dtypes[0].value} main "
                f"and {dtypes[1].value} index caches, {ranks} ranks",
            )


def start(serving: Serving, config: aot.ServingConfig) -> None:
    """Load the kernels onto this process's emulated GPU; compiles what the cache does not hold.

    Raises:
        RuntimeError: see rocm_msa.emulated.start.
    """
    from rocm_msa import emulated

    metrics.add(*_COUNTS)
    emulated.start(aot.builds(config), serving.options.code_objects)
    without = ["dense_attention"] if serving.model.num_dense_layers else []
    logger.warning(
        "backend emulated: gfx950 kernels run in an emulator on the CPU, which is slow; as its "
        "reference, having no such kernel, runs %s",
        ", ".join(without) or "no op",
    )


def exchange(group: Any, serving: Serving, most: Batch, dtype: torch.dtype) -> Exchange:
    """The exchange's gfx950 kernel on mailboxes that the ranks' processes share; collective."""
    from dcp.runner import PeerExchange
    from rocm_msa.emulated import EmulatedPeers

    loaded = launcher.offered(BACKEND)

    class EmulatedExchange(PeerExchange):
        def select(self, *args: Any, **options: Any) -> torch.Tensor:
            with launcher.using(loaded):
                return super().select(*args, **options)

    model = serving.model
    made = EmulatedExchange(
        group,
        model.index_heads,
        max_rows=most.rows,
        max_blocks=most.max_blocks,
        device="cpu",
        topk=model.topk_blocks,
        head_dim=model.index_dim,
        backend="flydsl",
        grid=_GRID,
        runtime=EmulatedPeers(loaded.gpu),
    )
    loaded.gpu.map(made.status)
    return made


def mono_runner(group: Any, shape: Shape, max_blocks: int) -> MonoRunner:
    """The mono layer's kernel on memory that the ranks' processes share; collective."""
    from mono_kernel.runner import MonoRunner
    from rocm_msa.emulated import EmulatedPeers

    loaded = launcher.offered(BACKEND)
    made = MonoRunner(
        group,
        shape,
        max_blocks=max_blocks,
        device="cpu",
        workgroups=_MONO_GRID,
        runtime=EmulatedPeers(loaded.gpu),
        kernels=loaded,
    )
    loaded.gpu.map(made.status)
    return made

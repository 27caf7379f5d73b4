"""Which configurations capture decode steps into full graphs (graphs.py), and what is refused.

vLLM's default is FULL_AND_PIECEWISE. These layers are not compiled by torch, so that there are no
pieces to capture: decode steps have full graphs (FULL_DECODE_ONLY), all others run as they are.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rocm_msa.errors import Refusals, expect
from rocm_msa.vllm_plugin import compat

if TYPE_CHECKING:
    from rocm_msa.vllm_plugin.verify import Options

logger = logging.getLogger("vllm.rocm_msa")

_MODE = "--compilation-config cudagraph_mode"


def why_none(vllm_config: Any, options: Options) -> str | None:
    """Why no step of this configuration can be captured; None where decode steps can."""
    if vllm_config.device_config.device_type == "cpu":
        return "there are none on the CPU"
    if options.backend == "reference":
        return "the reference ops read lengths on the host"
    if not compat.runs_model_runner_v2(vllm_config):
        return "vLLM takes its model runner V1, which they were not made for"
    return None


def check_config(vllm_config: Any, options: Options, refusals: Refusals) -> None:
    """Refuse graphs and compilation that were asked for and would not be served."""
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    if compilation.mode is not None:
        refusals.check(
            compilation.mode == CompilationMode.NONE,
            "--compilation-config mode: torch does not compile these layers; "
            + expect("mode", "NONE or unset", compilation.mode.name),
        )
    asked = compilation.cudagraph_mode
    if vllm_config.model_config.enforce_eager or asked in (None, CUDAGraphMode.NONE):
        return
    if vllm_config.device_config.device_type == "cpu":
        return  # vLLM passes over it
    for mode, reason in (
        (CUDAGraphMode.PIECEWISE, "torch does not compile these layers, so there are no pieces"),
        (CUDAGraphMode.FULL, "steps with prompts are planned by their lengths, on the host"),
    ):
        wanted = expect(_MODE, "FULL_DECODE_ONLY, NONE or unset", mode.name)
        refusals.check(asked != mode, f"{wanted}: {reason}")
    why = why_none(vllm_config, options)
    refusals.check(why is None, f"{_MODE}: {asked.name} is asked for, and there are none: {why}")


def settle(vllm_config: Any, options: Options) -> None:
    """Set vLLM's modes of compilation and capture, and say which."""
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    asked, why = compilation.cudagraph_mode, why_none(vllm_config, options)
    if why is None and vllm_config.model_config.enforce_eager:
        why = "--enforce-eager"
    if why is None and asked == CUDAGraphMode.NONE:
        why = f"{_MODE} is NONE"
    if why is None and asked is None and vllm_config.optimization_level == 0:
        why = "-O0"
    compilation.mode = CompilationMode.NONE
    if why is not None:
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        logger.info("rocm-msa: no graphs: %s", why)
        return
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    logger.info(
        "rocm-msa: decode steps are captured into full graphs (FULL_DECODE_ONLY), no others: torch "
        "does not compile these layers into pieces"
    )

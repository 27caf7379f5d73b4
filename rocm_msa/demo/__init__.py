"""The demo: a tiny checkpoint behind a real vLLM server with NVFP4 caches; on emulated gfx950."""

from rocm_msa.demo.emulated import EmulatedOptions, run_emulated_demo
from rocm_msa.demo.run import DemoOptions, run_demo
from rocm_msa.demo.server import DemoError

__all__ = ["DemoError", "DemoOptions", "EmulatedOptions", "run_demo", "run_emulated_demo"]

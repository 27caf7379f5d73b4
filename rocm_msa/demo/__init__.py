"""The demo: a tiny checkpoint behind a real vLLM server with NVFP4 caches."""

from rocm_msa.demo.run import DemoOptions, run_demo
from rocm_msa.demo.server import DemoError

__all__ = ["DemoError", "DemoOptions", "run_demo"]

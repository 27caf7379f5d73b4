"""rocm-msa: MiniMax Sparse Attention over NVFP4 KV caches, AMD first.

Importing this package imports neither torch, triton, flydsl nor vllm; sub-packages import what
they need. See docs/architecture.md for the tree and the dependency rule.
"""

__version__ = "0.1.0"

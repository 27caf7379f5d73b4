"""Building blocks that FlyDSL traces into gfx950 kernels.

Modules here import flydsl at the top and never torch; only ops/*/flydsl_gfx950*.py import them,
inside the functions that trace a kernel. Everything is inlined: a helper costs nothing by itself.
A helper with a run-time `if` or loop needs `@flyc.jit`; those here are straight-line code.
"""

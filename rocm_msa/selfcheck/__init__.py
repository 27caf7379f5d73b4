"""What `rocm-msa verify` does: opcodes, kernels and times of this machine against what is known.

    opcodes    single gfx950 instructions against the emulator's answers, bit for bit
    kernels    every op's kernels against the references, at small and real sizes
    times      the ops' times against the modelled ones
    group      what needs several GPUs, and the mono layer: the benchmarks of the source tree
    report     all of it as JSON and HTML

Nothing that serves imports this package.
"""

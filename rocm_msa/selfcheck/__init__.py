"""What `rocm-msa verify` does: opcodes, kernels and times of this machine against what is known.

    opcodes    single gfx950 instructions against the emulator's answers, bit for bit
    kernels    every op's kernels against the references, at small and real sizes
    mono       the mono kernel against its reference
    times      the ops' times against the modelled ones
    report     all of it as JSON and HTML

Nothing that serves imports this package.
"""

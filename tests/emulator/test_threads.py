"""Code objects may be read in several threads at once: LLVM's disassembler serves them in turn."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.emulator.assembler import assemble, instructions

BODY = "\n".join(f"v_add_u32 v{1 + i % 60}, {i % 64}, v{1 + i % 7}" for i in range(400))


def test_all_threads_read_the_same_instructions():
    code = assemble(BODY)
    alone = instructions(code)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(instructions, [code] * 16))
    assert all(one == alone for one in found)

"""What the ALU tests share: edge values, running one instruction on them, comparing floats.

A test of one opcode takes it as the parameter `opcode`: test_alu_coverage.py collects those
parameters, and the fixture `opcode_is_launched`, which every such file imports, fails a test that
never launched its opcode.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gfx950_emu import launch
from tests.emulator.assembler import kernel

U32 = np.array(
    [0, 1, 2, 31, 0x7F, 0x8000, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xDEADBEEF, 0x12345678,
     3, 5, 7, 32, 33, 64, 0xFF, 0x80, 0x7FFF, 0xFFFF, 0xFFFFFF, 0x800000, 0x80000001, 0xFFFFFF80],
    np.uint32,
)  # fmt: skip
U64 = np.array(
    [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0], np.uint64
)
# Codes. The first twelve are what instructions of three sources are tried on.
F32 = np.array(
    [0x00000000, 0x80000000, 0x3F800000, 0xC0490FDB, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001,
     0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0x00800000, 0xBF800000, 0xFF7FFFFF, 0x3F000000, 0x4B000001,
     0xCB7FFFFF, 0x3FC00000, 0xC0200000, 0x34000000, 0x5F000000, 0x4F7FFFFF, 0x447A4000, 0xFF800001,
     0x3EFFFFFF, 0xC3808000], np.uint32,
)  # fmt: skip
F16 = np.array(
    [0, 0x8000, 0x3C00, 0xC248, 0x7C00, 0xFC00, 0x7E00, 0x7D01, 1, 0x83FF, 0x7BFF, 0x0400, 0xBC00,
     0xFBFF, 0x3800, 0x3555, 0xC500, 0x1400, 0x6401, 0x3C01, 0xDC20, 0xFD00], np.uint32,
)  # fmt: skip
F64 = np.array(
    [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 5e-324, -2.2250738585072009e-308, 1e308,
     2.2250738585072014e-308, np.pi, -1e308, 0.5, 1e16, -3.7, 123456.75, 2.5,
     1.7976931348623157e308],
    np.float64,
)  # fmt: skip
LANE = np.arange(64)
LAUNCHED: set[str] = set()  # opcodes of the kernels that the running test launched


@pytest.fixture(autouse=True)
def opcode_is_launched(request):
    LAUNCHED.clear()
    yield
    opcode = getattr(request.node, "callspec", None) and request.node.callspec.params.get("opcode")
    assert opcode is None or opcode in LAUNCHED, f"{opcode} was not launched"


def start(body: str, **settings):
    """The code object of `body`, noted for `opcode_is_launched`."""
    code = kernel(body, **settings)
    for instruction in code.kernels["k"].instructions:
        name = instruction.text.split()[0]
        LAUNCHED.add(name)
        for suffix in ("_e32", "_e64", "_dpp", "_sdwa"):
            LAUNCHED.add(name.removesuffix(suffix))
    return code


def run(instruction: str, inputs: list[np.ndarray], out_dwords: int = 1, before: str = "",
        vgprs: int = 64, first_out: int = 20, **settings) -> np.ndarray:  # fmt: skip
    """[out_dwords, n]: `instruction` reads v4, ... (a dword an input row), writes v20, ...

    `before` runs once the sources are loaded, `first_out` is another register than v20,
    `settings` go to `assembler.kernel`.
    """
    rows = np.concatenate([np.atleast_2d(r) for r in inputs]).astype(np.uint32)
    n = rows.shape[1]
    padded = -(-n // 64) * 64
    source = np.zeros((len(rows), padded), np.uint32)
    source[:, :n] = rows
    out = np.zeros((out_dwords, padded), np.uint32)
    body = ["s_load_dwordx4 s[4:7], s[0:1], 0x0", "s_lshl_b32 s8, s2, 8",
            "v_lshlrev_b32 v1, 2, v0", "v_add_u32 v1, s8, v1"]  # fmt: skip
    for k in range(out_dwords):
        body.append(f"v_mov_b32 v{first_out + k}, 0")
    body.append("s_waitcnt lgkmcnt(0)")
    for k in range(len(rows)):
        body += [
            f"v_add_u32 v2, {k * padded * 4:#x}, v1",
            f"global_load_dword v{4 + k}, v2, s[4:5]",
        ]
    body += ["s_waitcnt vmcnt(0)", before, instruction]
    for k in range(out_dwords):
        body += [f"v_add_u32 v2, {k * padded * 4:#x}, v1",
                 f"global_store_dword v2, v{first_out + k}, s[6:7]"]  # fmt: skip
    code = start("\n".join(body), vgprs=vgprs, **settings)
    launch(code, "k", padded // 64, 64, [source, out]).raise_for_findings()
    return out[:, :n]


def sources(count: int, wide: bool = False) -> str:
    """v4, v5, ... or v[4:5], v[6:7], ... as `run` loads them."""
    if wide:
        return ", ".join(f"v[{4 + 2 * k}:{5 + 2 * k}]" for k in range(count))
    return ", ".join(f"v{4 + k}" for k in range(count))


def grid(values: np.ndarray, count: int) -> list[np.ndarray]:
    """All tuples of `count` values; of the first twelve when there are three."""
    picked = values if count < 3 else values[:12]
    table = np.array(list(itertools.product(picked, repeat=count)), values.dtype)
    return list(table.T.copy())


def low(x) -> np.ndarray:
    """The low 32 bits of integers of any width or sign."""
    return (np.asarray(x) & np.asarray(x).dtype.type(0xFFFFFFFF)).astype(np.uint32)


def each(function, bits: int = 32):
    """An oracle on whole arrays from one on Python integers."""
    kind = np.uint64 if bits == 64 else np.uint32
    mask = (1 << bits) - 1
    return lambda *a: np.array([function(*map(int, v)) & mask for v in zip(*a, strict=True)], kind)


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def dwords(x: np.ndarray) -> np.ndarray:
    """[2, n] low and high dwords of 64-bit values."""
    return np.ascontiguousarray(x).view(np.uint32).reshape(-1, 2).T


def quads(out: np.ndarray, dtype=np.uint64) -> np.ndarray:
    """64-bit values of [2, n] dwords."""
    return np.ascontiguousarray(out[:2].T).view(dtype)[:, 0]


def f(x: np.ndarray) -> np.ndarray:
    return x.astype(np.uint32).view(np.float32)


def h(x: np.ndarray) -> np.ndarray:
    return (x & 0xFFFF).astype(np.uint16).view(np.float16)


def code_type(x: np.ndarray):
    return {2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize]


def flush(x: np.ndarray) -> np.ndarray:
    """Denormals as zeros of their sign."""
    small = (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny)
    return np.where(small, np.copysign(x.dtype.type(0), x), x)


def same_floats(got: np.ndarray, want: np.ndarray, ulp: int = 0) -> None:
    """Bit for bit or within `ulp` codes; any NaN for a NaN."""
    want = np.asarray(want, dtype=got.dtype)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    kind = code_type(got)
    a, b = got.view(kind)[~nan], want.view(kind)[~nan]
    if not ulp:
        np.testing.assert_array_equal(a, b)
        return
    top = kind(1 << 8 * got.dtype.itemsize - 1)
    far = np.where(a > b, a - b, b - a)
    assert ((a & top) == (b & top)).all() and (far <= ulp).all(), far.max()

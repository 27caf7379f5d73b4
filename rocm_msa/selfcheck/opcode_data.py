"""The stored opcode checks: a gfx950 kernel an instruction, its inputs, the emulator's answer.

    data/opcodes.json             the cases and where all of it came from
    data/opcodes.hsaco.xz         their kernels, one code object
    data/opcodes.expected.xz      uint32, a case after the other: out [GROUPS, slots, LANES]

tools/make_opcode_checks.py writes the three. A kernel takes three pointers: inputs
uint32 [GROUPS, SLOTS, LANES], out, memory uint8 [GROUPS, MEMORY_BYTES]; workgroup g of 64 lanes
works on part g of each. Inputs and memory are a function of the case's number and kind alone.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rocm_msa.errors import expect

FOLDER = Path(__file__).parent / "data"
FORMAT = 1
GROUPS, LANES = 2, 64
SLOTS, MEMORY_BYTES = 48, 4096
FIRST_VGPR, SCALAR_SLOT = 4, 44
"""Slot n of the inputs is loaded into v(n + 4); the scalars are the first dwords of slot 44."""

# Edge codes: small and large integers; f32 zeros, ones, infinities, NaNs, denormals, limits.
EDGES = np.array(
    [0, 1, 2, 5, 31, 32, 63, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF,
     0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 0x12345678, 0xDEADBEEF, 0x3F800000, 0xBF800000, 0x3F000000,
     0xC0490FDB, 0x7F800000, 0xFF800000, 0x7FC00000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0x00800000,
     0x43E00000, 0xC3E80000, 0x3EFFFFFF, 0x4B000001, 0x42F60000],
    np.uint32,
)  # fmt: skip
# E4M3 and bf16 codes of 0, +-0.5, +-1, +-1.5, +-2: products of them add up exactly in f32.
SMALL_FP8 = np.array([0x00, 0x30, 0x38, 0x3C, 0x40, 0xB0, 0xB8, 0xBC, 0xC0], np.uint8)
SMALL_BF16 = np.array(
    [0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0xBF00, 0xBF80, 0xBFC0, 0xC000], np.uint16
)
SMALL_F32 = np.array([0.0, 1.0, -2.0, 0.25, 96.0, -7.5], np.float32)
SCALES = np.array([0x7D, 0x7E, 0x7F, 0x80, 0x81], np.uint8)


@dataclass(frozen=True)
class Case:
    """name: of its kernel. text: the instruction. kind: of the inputs, see `inputs`. out: what each
    slot of the output is, "v40" for instance. float_slots: of those, the ones that hold f32, where
    any NaN equals any other; ulp: by how many codes they may differ."""

    name: str
    text: str
    kind: str
    out: tuple[str, ...]
    float_slots: tuple[int, ...] = ()
    ulp: int = 0

    @property
    def mnemonic(self) -> str:
        return self.name.split("_", 2)[2]


@dataclass(frozen=True)
class Stored:
    """source: commit, command, versions. expected: [GROUPS, slots, LANES] uint32 a case."""

    source: dict[str, str]
    cases: tuple[Case, ...]
    not_covered: dict[str, str]
    code_object: bytes
    expected: tuple[np.ndarray, ...]


def random_words(seed: int, count: int) -> np.ndarray:
    """uint32 [count] that depend on nothing but the arguments (splitmix64)."""
    with np.errstate(over="ignore"):
        x = np.arange(count, dtype=np.uint64) + np.uint64(seed) * np.uint64(1 << 32)
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return (x >> np.uint64(32)).astype(np.uint32)


def inputs(number: int, kind: str) -> np.ndarray:
    """uint32 [GROUPS, SLOTS, LANES] of case `number`.

    kind: "bits": a third edge codes, a third f32 of moderate size, a third any bits; "fp8", "bf16":
    v4..v19 hold such small values, v20..v23 f32, v24..v25 E8M0 scales; "places": slot 0 holds byte
    offsets, each multiple of 16 below 1024 once a group, the others any bits.
    """
    shape, count = (GROUPS, SLOTS, LANES), GROUPS * SLOTS * LANES
    words, choice = random_words(2 * number, count), random_words(2 * number + 1, count)
    moderate = (words & np.uint32(0x807FFFFF)) | ((choice >> np.uint32(8)) % 40 + 107) << 23
    edges = EDGES[(choice >> np.uint32(4)) % len(EDGES)]
    found = np.select([choice % 3 == 0, choice % 3 == 1], [edges, moderate], words)
    found = found.astype(np.uint32).reshape(shape)
    if kind == "places":
        order = np.argsort(words[: GROUPS * LANES].reshape(GROUPS, LANES), axis=1)
        found[:, 0] = order.astype(np.uint32) * 16
    if kind in ("fp8", "bf16"):
        small = SMALL_FP8 if kind == "fp8" else SMALL_BF16
        per = 4 // small.itemsize
        picks = random_words(10**6 + number, count * per)
        found = small[picks % len(small)].view(np.uint32).reshape(shape).copy()
        chosen = choice.reshape(shape)
        found[:, 16:20] = SMALL_F32[chosen[:, 16:20] % len(SMALL_F32)].view(np.uint32)
        scales = SCALES[picks[: 2 * GROUPS * LANES * 4] % len(SCALES)]
        found[:, 20:22] = scales.view(np.uint32).reshape(GROUPS, 2, LANES)
    return found


def memory(number: int) -> np.ndarray:
    """uint8 [GROUPS, MEMORY_BYTES] before the launch; stores and atomics change it."""
    words = random_words(2 * 10**6 + number, GROUPS * MEMORY_BYTES // 4)
    return words.view(np.uint8).reshape(GROUPS, MEMORY_BYTES)


def load(folder: Path = FOLDER) -> Stored:
    """What was stored. ValueError: of another format, or its parts do not belong together."""
    described = json.loads((folder / "opcodes.json").read_text())
    if described["format"] != FORMAT:
        raise ValueError(expect(f"{folder}/opcodes.json: format", FORMAT, described["format"]))
    cases = tuple(
        Case(**{k: tuple(v) if isinstance(v, list) else v for k, v in case.items()})
        for case in described["cases"]
    )
    code = lzma.decompress((folder / "opcodes.hsaco.xz").read_bytes())
    flat = np.frombuffer(lzma.decompress((folder / "opcodes.expected.xz").read_bytes()), np.uint32)
    sizes = [GROUPS * len(case.out) * LANES for case in cases]
    if sum(sizes) != len(flat):
        raise ValueError(expect(f"{folder}: words of answers", sum(sizes), len(flat)))
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    expected = tuple(p.reshape(GROUPS, -1, LANES) for p in parts)
    return Stored(described["source"], cases, described["not_covered"], code, expected)


def save(stored: Stored, folder: Path = FOLDER) -> None:
    """Write the three files."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "format": FORMAT,
        "source": stored.source,
        "not_covered": stored.not_covered,
        "cases": [asdict(case) for case in stored.cases],
    }
    (folder / "opcodes.json").write_text(json.dumps(described, indent=0) + "\n")
    (folder / "opcodes.hsaco.xz").write_bytes(lzma.compress(stored.code_object, preset=9))
    answers = b"".join(np.ascontiguousarray(e).tobytes() for e in stored.expected)
    (folder / "opcodes.expected.xz").write_bytes(lzma.compress(answers, preset=9))


def wrong_words(case: Case, got: np.ndarray, want: np.ndarray) -> Sequence[tuple[int, int, int]]:
    """(group, slot, lane) of each word of the output that is not as stored."""
    bad = got != want
    for slot in case.float_slots:
        a, b = got[:, slot], want[:, slot]
        both_nan = _is_nan(a) & _is_nan(b)
        near = (_is_nan(a) == _is_nan(b)) & (np.abs(_ordered(a) - _ordered(b)) <= case.ulp)
        bad[:, slot] &= ~(both_nan | near)
    return [tuple(int(i) for i in place) for place in np.argwhere(bad)]


def _is_nan(codes: np.ndarray) -> np.ndarray:
    return (codes & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)


def _ordered(codes: np.ndarray) -> np.ndarray:
    """f32 codes as integers in the order of their values; one apart are neighbours. Both zeros are
    told apart."""
    magnitude = (codes & np.uint32(0x7FFFFFFF)).astype(np.int64)
    return np.where(codes >> np.uint32(31) == 1, -1 - magnitude, magnitude)

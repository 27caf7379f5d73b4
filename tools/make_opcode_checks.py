"""Write rocm_msa/selfcheck/data/opcodes.*: checks of single gfx950 instructions.

    python tools/make_opcode_checks.py

Takes every form of instruction that the kernels of the TP 4 and TP 8 configurations hold (mnemonic,
kinds of operands, modifiers), puts each into a kernel of its own between a prologue that loads its
registers and an epilogue that stores what it may have changed, assembles all of them into one code
object, runs it in the emulator, and stores the code, the cases and the answers. What cannot be
checked that way is listed with its reason. Needs the packages of the emulator, FlyDSL and ld.lld;
no GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gfx950_emu import CodeObject
from gfx950_emu.decode import SUFFIX
from gfx950_emu.operands import split
from gfx950_emu.records import BRANCH, DS, FLAT, MFMA, MUBUF, SMEM, opcodes
from rocm_msa import kernel_manifest
from rocm_msa.aot import ServingConfig, builds, compile_builds
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.selfcheck import opcode_data as data
from rocm_msa.selfcheck.opcodes import run_all
from tools.opcode_assembly import FOOTER, HEADER, METADATA, assemble

RESULT, RESULT_SGPR = 40, 40  # first registers that a checked instruction writes
READ_BACK = 50
APPROXIMATE = {"v_exp_f32": 2, "v_log_f32": 2, "v_rcp_f32": 2, "v_rsq_f32": 2}
NOT_COVERED = {
    "s_memrealtime": "its result is the time",
    "s_endpgm": "ends every kernel here",
    "s_waitcnt": "in every kernel here; what it waits for is the emulator's check WAIT",
}
REGISTERS = re.compile(r"\b([vsa])(?:(\d+)|\[(\d+):(\d+)\])")
NUMBERS = re.compile(r"\boffset[01]?:-?\d+")
MODIFIERS = re.compile(r"\s+(?![^\[(]*[\])])")
KEPT = ("vcc", "exec", "m0", "vcc_lo", "vcc_hi", "exec_lo", "exec_hi")


@dataclass
class Check:
    """One kernel to be.

    text: the instruction. mnemonic: its name, where the text has more lines. loads: VGPRs that the
    inputs fill. out: VGPRs and SGPRs that are stored, beside SCC, VCC and EXEC. floats: of the
    VGPRs, those with an f32. kind, ulp: of the case. before, after: lines around the instruction.
    lds: bytes.
    """

    text: str
    mnemonic: str = ""
    loads: set[int] = field(default_factory=set)
    out: list[str] = field(default_factory=list)
    floats: set[str] = field(default_factory=set)
    kind: str = "bits"
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    lds: int = 0
    ulp: int = 0

    def case(self, number: int) -> data.Case:
        mnemonic = self.mnemonic or mnemonic_of(self.text)
        out = (*self.out, "scc", "vcc_lo", "vcc_hi", "exec_lo", "exec_hi")
        floats = tuple(n for n, name in enumerate(out) if name in self.floats)
        name = f"check_{number:03}_{mnemonic}"
        return data.Case(name, self.text, self.kind, out, floats, self.ulp)

    def assembly(self, case: data.Case, modes: dict[str, int]) -> str:
        lines = [HEADER.format(name=case.name, out_bytes=len(case.out) * data.LANES * 4)]
        for register in sorted(self.loads):
            slot = register - data.FIRST_VGPR
            base, rest = divmod(slot, 16)
            lines.append(f"global_load_dword v{register}, v{1 + base}, s[4:5] offset:{rest * 256}")
        lines += [
            "s_waitcnt vmcnt(0) lgkmcnt(0)",
            "s_mov_b64 vcc, s[32:33]",
            "s_and_b32 m0, s30, 63",
        ]
        lines += [f"s_mov_b32 s{RESULT_SGPR + n}, s{24 + n}" for n in range(2)]
        lines += [*self.before, "s_bitcmp1_b32 s31, 0", *["s_nop 15"] * 2]
        lines += [self.text.replace("{name}", case.name), *["s_nop 15"] * 3]
        lines += ["s_cselect_b32 s60, 1, 0", "s_mov_b64 s[62:63], exec", "s_mov_b64 exec, -1"]
        lines += ["s_waitcnt vmcnt(0) lgkmcnt(0)", "s_nop 15", *self.after]
        lines += ["s_waitcnt vmcnt(0) lgkmcnt(0)"]
        places = {"scc": "s60", "exec_lo": "s62", "exec_hi": "s63"}
        for slot, name in enumerate(case.out):
            register = places.get(name, name)
            if not register.startswith("v") or register.startswith("vcc"):
                lines.append(f"v_mov_b32 v90, {register}")
                register = "v90"
            base, rest = divmod(slot, 16)
            lines.append(f"global_store_dword v{1 + base}, {register}, s[6:7] offset:{rest * 256}")
        lines += ["s_endpgm", FOOTER.format(name=case.name, lds=self.lds, **modes)]
        return "\n".join(lines)


def parts_of(text: str) -> tuple[str, list[str], list[str]]:
    """(mnemonic, operands, modifiers) of a disassembled instruction."""
    mnemonic, _, rest = text.partition(" ")
    operands = split(rest)
    words: list[str] = []
    if operands:
        operands[-1], *words = MODIFIERS.split(operands[-1])
    return mnemonic, operands, words


def mnemonic_of(text: str) -> str:
    """The name that the emulator's table has."""
    word = text.partition(" ")[0]
    return word if word in opcodes() else SUFFIX.sub("", word)


def form_key(text: str) -> tuple:
    """Instructions with the same key are checked once: registers and constants are left out."""
    mnemonic, operands, words = parts_of(re.sub(r"\ba(?=\d|\[)", "v", text))
    kinds = []
    for operand in operands:
        bare = operand if operand.strip("-|") in KEPT else REGISTERS.sub(r"\1", operand)
        kinds.append(re.sub(r"^-?(0x[0-9a-f]+|\d+)$", "integer", bare))
    return mnemonic, *kinds, *(NUMBERS.sub("offset", word) for word in words)


class Places:
    """Hands out registers: aligned, from the inputs' VGPRs and SGPRs or from the results'."""

    def __init__(self) -> None:
        self.next = {"v": data.FIRST_VGPR, "s": 20, "V": RESULT, "S": RESULT_SGPR}

    def take(self, letter: str, count: int) -> tuple[str, range]:
        even = min(count, 2) if letter in "vV" else min(count, 4)
        first = -(-self.next[letter] // even) * even
        self.next[letter] = first + count
        name = letter.lower()
        text = f"{name}{first}" if count == 1 else f"{name}[{first}:{first + count - 1}]"
        return text, range(first, first + count)


def alu_check(text: str) -> Check:
    """A vector, scalar or matrix instruction: its sources from the inputs, its results out."""
    mnemonic, operands, words = parts_of(text)
    name = mnemonic_of(text)
    info, found, places = opcodes()[name], Check(""), Places()
    taken: dict[tuple, tuple[str, range]] = {}
    matrix = info.family == MFMA
    if matrix:
        found.kind = "bf16" if "bf16" in name else "fp8"
        places.next["v"] = data.FIRST_VGPR
    renamed = []
    for at, (token, operand) in enumerate(zip(info.form, operands, strict=True)):
        written = token[0] in "drxm"

        def place(match, written=written, token=token, at=at):
            letter, one, first, last = match.groups()
            letter = letter.replace("a", "v")  # accumulation registers are read and written alike
            count = 1 if one else int(last) - int(first) + 1
            if matrix and at in (3, 4, 5):  # addend, scales: where the inputs have them
                places.next["v"] = {3: 20, 4: 24, 5: 25}[at]
            key = (match[0], at if written or matrix else None)  # one source twice stays one
            register, numbers = taken.setdefault(
                key, places.take(letter.upper() if written else letter, count)
            )
            names = [f"{letter}{n}" for n in numbers]
            if letter == "v":  # results too: what is not written must stay
                found.loads.update(numbers)
            if written or token[0] == "w":
                found.out += names
                if token in ("df32", "dpk32", "rf32") or matrix or name == "v_cvt_pk_f32_fp8":
                    found.floats.update(names)
            return register

        renamed.append(operand if operand.strip("-|") in KEPT else REGISTERS.sub(place, operand))
    moves = name in ("v_cndmask_b32", "v_pk_mov_b32")
    found.floats = set() if moves else found.floats
    found.ulp = APPROXIMATE.get(name, 0)
    found.text = f"{mnemonic} {', '.join(renamed)} {' '.join(words)}".strip()
    return found


def width_of(token: str) -> int:
    return int(token[2:]) // 32


def span(letter: str, first: int, count: int) -> str:
    return f"{letter}{first}" if count == 1 else f"{letter}[{first}:{first + count - 1}]"


def memory_check(text: str) -> Check:
    """A load, store or atomic on the case's memory; v4 is the place, v[6:7] its address."""
    mnemonic, operands, words = parts_of(text)
    info = opcodes()[mnemonic]
    words.sort(key=lambda word: not word.startswith("offset:"))
    if words and words[0].startswith("offset:") and not 0 <= int(words[0][7:]) < 2048:
        words[0] = "offset:128"
    found = Check("", loads={4}, kind="places")
    found.before = [
        "v_mov_b32 v7, s9", "v_add_co_u32 v6, vcc, s8, v4", "v_addc_co_u32 v7, vcc, 0, v7, vcc",
        "s_mov_b64 vcc, s[32:33]",
    ]  # fmt: skip
    alone = operands[-1] == "off"
    address, base = ("v[6:7]", "off") if alone else ("v4", "s[8:9]")
    texts = []
    for token in info.form:
        if token[0] == "d" or (token[0] == "@" and "sc0" in words):
            count = width_of("d" + token[1:])
            texts.append(span("v", RESULT, count))
            found.out += [f"v{RESULT + n}" for n in range(count)]
        elif token[0] == "t":
            found.loads.update(range(8, 8 + width_of(token)))
            texts.append(span("v", 8, width_of(token)))
        elif token in "ag":
            texts.append(address if token == "a" else base)
    if any(token[0] == "t" for token in info.form):
        offset = next((w for w in words if w.startswith("offset:")), "")
        found.after = [
            f"global_load_dwordx4 v[{READ_BACK}:{READ_BACK + 3}], v4, s[8:9] {offset} sc0 sc1"
        ]
        found.out += [f"v{READ_BACK + n}" for n in range(4)]
    found.text = f"{mnemonic} {', '.join(texts)} {' '.join(words)}".strip()
    return found


def lds_check(text: str) -> Check:
    """An LDS instruction on 4 KiB of known content; v4 is the place."""
    mnemonic, _, words = parts_of(text)
    info = opcodes()[mnemonic]
    found = Check("", loads={4, *range(8, 16)}, kind="places", lds=4096)
    found.before = ["v_lshlrev_b32 v16, 2, v1"]
    found.before += [f"ds_write_b128 v16, v[8:11] offset:{1024 * n}" for n in range(4)]
    found.before += ["s_waitcnt lgkmcnt(0)", "s_barrier"]
    words = [re.sub(r"^offset:-?\d+$", "offset:64", w) for w in words]
    words = [re.sub(r"^(offset[01]):\d+$", r"\1:1", w) for w in words]
    texts, sources = [], iter(("v4", 8, 12))
    if mnemonic.startswith("ds_swizzle"):
        sources = iter((8,))
    for token in info.form:
        if token[0] == "d":
            count = width_of(token)
            texts.append(span("v", RESULT, count))
            found.out += [f"v{RESULT + n}" for n in range(count)]
        else:
            source = next(sources)
            wide = width_of(token)
            texts.append(source if source == "v4" else span("v", source, wide))
    found.after = [
        f"ds_read_b128 v[{READ_BACK + 4 * n}:{READ_BACK + 4 * n + 3}], v4 offset:{offset}"
        for n, offset in enumerate((0, 64, 256))
    ]
    found.out += [f"v{READ_BACK + n}" for n in range(12)]
    found.text = f"{mnemonic} {', '.join(texts)} {' '.join(words)}".strip()
    return found


def scalar_load_check(text: str) -> Check:
    mnemonic, _, _ = parts_of(text)
    count = width_of(opcodes()[mnemonic].form[0])
    found = Check(f"{mnemonic} {span('s', RESULT_SGPR, count)}, s[8:9], 0x50")
    found.out = [f"s{RESULT_SGPR + n}" for n in range(count)]
    return found


def branch_check(text: str) -> Check:
    """Taken by the first workgroup alone."""
    mnemonic, _, _ = parts_of(text)
    sets = ["s_cmp_lt_u32 s2, 1"]
    if "exec" in mnemonic:
        sets.append("s_cselect_b64 exec, -1, 0")
    elif "vcc" in mnemonic:
        sets.append("s_cselect_b64 vcc, -1, 0")
    lines = [*sets, "s_mov_b32 s40, 1", f"{mnemonic} .L{{name}}_taken", "s_mov_b32 s40, 2"]
    return Check("\n".join([*lines, ".L{name}_taken:"]), mnemonic, out=["s40"])


def other_check(text: str) -> Check:
    """Cache control and what else has no operands: a store before it, a load after it."""
    found = Check(text, loads={4, 8}, kind="places")
    found.before = ["global_store_dword v4, v8, s[8:9] sc1", "s_waitcnt vmcnt(0)"]
    found.after = ["global_load_dword v50, v4, s[8:9] sc1"]
    found.out = ["v50"]
    return found


def check_of(text: str) -> Check:
    name = mnemonic_of(text)
    makers = {DS: lds_check, FLAT: memory_check, SMEM: scalar_load_check, BRANCH: branch_check}
    family = opcodes()[name].family
    if family == MUBUF or not opcodes()[name].form or opcodes()[name].form == ("n",):
        return other_check(text)
    return makers.get(family, alu_check)(text)


def used_instructions() -> tuple[dict[tuple, str], set[tuple[str, int]]]:
    """(an instruction of each form that the kernels hold, float modes of the kernels)."""
    configs = [
        ServingConfig.of(MINIMAX_M3, tp, kind, kind)
        for tp in (4, 8)
        for kind in ("nvfp4", "fp8", "bf16")
    ]
    found: dict[tuple, str] = {}
    modes = set()
    with tempfile.TemporaryDirectory() as folder:
        compile_builds(builds(*configs), Path(folder))
        manifest = kernel_manifest.read(Path(folder))
        for entry in sorted(manifest.kernels.values(), key=lambda e: e.name):
            code = CodeObject.from_bytes(kernel_manifest.read_code_object(Path(folder), entry))
            for kernel in code.kernels.values():
                d = kernel.descriptor
                modes.add((d.float_mode.bits, d.ieee, d.dx10_clamp))
                for instruction in kernel.instructions:
                    found.setdefault(form_key(instruction.text), instruction.text)
    return found, modes


def source_of(checks: list[Check], cases: list[data.Case], modes: dict[str, int]) -> str:
    kernels = [c.assembly(case, modes) for c, case in zip(checks, cases, strict=True)]
    notes = [
        METADATA.strip().replace("- .name", "  - .name").format(name=case.name, lds=c.lds)
        for c, case in zip(checks, cases, strict=True)
    ]
    head = '.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\n.amdhsa_code_object_version 6\n.text\n'
    note = ["---", "amdhsa.version: [1, 2]", 'amdhsa.target: "amdgcn-amd-amdhsa--gfx950"']
    note += ["amdhsa.kernels:", *notes, "..."]
    text = "\n".join([".amdgpu_metadata", *note, ".end_amdgpu_metadata"])
    return head + "\n".join(kernels) + "\n" + text + "\n"


def emulated(code: bytes, cases: list[data.Case]) -> list:
    import torch

    from rocm_msa.emulated import EmulatedGpu

    gpu = EmulatedGpu(lambda report: report.raise_for_findings())
    reach = lambda tensors: setattr(gpu, "buffers", tensors)  # noqa: E731
    return [out for _, out in run_all(code, cases, gpu, torch.device("cpu"), reach)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=data.FOLDER)
    folder = parser.parse_args().output
    used, modes = used_instructions()
    (mode, ieee, dx10_clamp), *others = sorted(modes)
    assert not others, f"kernels of several float modes: {modes}"
    fields = {"round_32": mode & 3, "round_16_64": mode >> 2 & 3, "denorm_32": mode >> 4 & 3,
              "denorm_16_64": mode >> 6 & 3, "ieee": ieee, "dx10_clamp": dx10_clamp}  # fmt: skip
    fields = {name: int(value) for name, value in fields.items()}
    texts = [used[key] for key in sorted(used) if key[0] not in NOT_COVERED]
    by_text = {c.text: c for c in map(check_of, texts)}
    checks = list(by_text.values())
    cases = [check.case(n) for n, check in enumerate(checks)]
    code = assemble(source_of(checks, cases, fields))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    source = {
        "command": "python tools/make_opcode_checks.py",
        "commit": commit,
        "flydsl": version("flydsl"),
        "rocm-llvm-python": version("rocm-llvm-python"),
        "made of": "the kernels of MiniMax-M3 at TP 4 and TP 8, NVFP4, FP8 and bf16 caches",
    }
    answers = emulated(code, cases)
    data.save(data.Stored(source, tuple(cases), NOT_COVERED, code, tuple(answers)), folder)
    print(f"{len(cases)} checks of {len({c.name[10:] for c in cases})} instructions")


if __name__ == "__main__":
    main()

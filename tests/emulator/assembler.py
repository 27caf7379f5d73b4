"""Small kernels from assembly for the emulator's own tests, through librocmllvm's assembler.

    code = kernel("v_add_f32 v0, v1, v2 ...", vgprs=32)

The text is the body; s_endpgm is added. At the start s[0:1] is the argument block and s2, s3, s4
the workgroup's numbers; v0 the lane in the workgroup.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import threading

from gfx950_emu.code_object import Argument, CodeObject, Instruction, Kernel
from gfx950_emu.descriptor import parse_descriptor
from gfx950_emu.disassembler import disassembler, find_library
from gfx950_emu.elf import Elf, Segment

TRIPLE = b"amdgcn-amd-amdhsa"
pointer = ctypes.c_void_p
ONE_AT_A_TIME = threading.Lock()  # LLVM's parts of one process


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(find_library()))
    for part in ("TargetInfo", "Target", "TargetMC", "AsmParser", "AsmPrinter"):
        getattr(lib, f"LLVMInitializeAMDGPU{part}")()
    text = ctypes.c_char_p
    for name, result, arguments in (
        ("LLVMContextCreate", pointer, []),
        ("LLVMContextDispose", None, [pointer]),
        ("LLVMModuleCreateWithNameInContext", pointer, [text, pointer]),
        ("LLVMSetTarget", None, [pointer, text]),
        ("LLVMSetModuleInlineAsm2", None, [pointer, text, ctypes.c_size_t]),
        ("LLVMGetTargetFromTriple", ctypes.c_int, [text, pointer, pointer]),
        ("LLVMCreateTargetMachine", pointer, [pointer, text, text, text, *[ctypes.c_int] * 3]),
        (
            "LLVMTargetMachineEmitToMemoryBuffer",
            ctypes.c_int,
            [pointer, pointer, ctypes.c_int, pointer, pointer],
        ),
        ("LLVMGetBufferStart", pointer, [pointer]),
        ("LLVMGetBufferSize", ctypes.c_size_t, [pointer]),
        ("LLVMDisposeMemoryBuffer", None, [pointer]),
        ("LLVMDisposeTargetMachine", None, [pointer]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def emit(source: str) -> bytes:
    """The object file of an assembly text. An error in it ends the process, as LLVM has it."""
    with ONE_AT_A_TIME:
        return _emit(source)


def _emit(source: str) -> bytes:
    lib = library()
    target, error, buffer = pointer(), ctypes.c_char_p(), pointer()
    assert not lib.LLVMGetTargetFromTriple(TRIPLE, ctypes.byref(target), ctypes.byref(error))
    context = lib.LLVMContextCreate()
    module = lib.LLVMModuleCreateWithNameInContext(b"test", context)
    lib.LLVMSetTarget(module, TRIPLE)
    lib.LLVMSetModuleInlineAsm2(module, source.encode(), len(source.encode()))
    machine = lib.LLVMCreateTargetMachine(target, TRIPLE, b"gfx950", b"", 2, 2, 0)
    failed = lib.LLVMTargetMachineEmitToMemoryBuffer(
        machine, module, 1, ctypes.byref(error), ctypes.byref(buffer)
    )
    assert not failed, error.value
    data = ctypes.string_at(lib.LLVMGetBufferStart(buffer), lib.LLVMGetBufferSize(buffer))
    lib.LLVMDisposeMemoryBuffer(buffer)
    lib.LLVMDisposeTargetMachine(machine)  # half a megabyte
    lib.LLVMContextDispose(context)  # with its module
    return data


@functools.lru_cache(maxsize=1024)
def assemble(body: str) -> bytes:
    """Machine code of `body`."""
    elf = Elf(emit(f".text\n{body}\ns_endpgm\n"))
    return bytes(elf.content(elf.section(".text")))


def instructions(code: bytes) -> tuple[Instruction, ...]:
    found, pc, raw = [], 0, ctypes.create_string_buffer(code, len(code))
    while pc < len(code):
        size, text = disassembler().decode(raw, pc, len(code))
        found.append(Instruction(pc, size, text, code[pc : pc + size]))
        pc += size
        if text == "s_endpgm" and all(
            code[k : k + 4] == b"\0\0\x80\xbf" for k in range(pc, len(code), 4)
        ):
            break
    return tuple(found)


class NoLines:
    def find(self, address: int) -> None:
        return None


def kernel(body: str, *, vgprs: int = 64, accum: int | None = None, lds: int = 0, scratch: int = 0,
           args: int = 8, mode: int = 0xF0, ieee: bool = True, dx10_clamp: bool = True,
           fp16_ovfl: bool = False) -> CodeObject:  # fmt: skip
    """A code object with one kernel, `k`, of `args` 8-byte arguments.

    `mode`: the low byte of MODE, two bits each of f32 rounding, f16/f64 rounding, f32 denormals
    (1 read, 2 written), f16/f64 denormals.
    """
    code = assemble(body)
    accum = vgprs if accum is None else accum
    rsrc1 = (vgprs // 8 - 1) | 12 << 6 | mode << 12 | dx10_clamp << 21 | ieee << 23
    rsrc1 |= fp16_ovfl << 26
    rsrc2 = 2 << 1 | 7 << 7 | 0 << 11  # two user SGPRs; workgroup ids x, y, z
    raw = bytearray(64)
    struct.pack_into("<III", raw, 0, lds, scratch, 8 * args)
    struct.pack_into("<IIIHH", raw, 44, accum // 4 - 1, rsrc1, rsrc2, 1 << 3, 0)
    found = Kernel(
        name="k",
        header_entry=0,
        preload_entry=None,
        entry=0,
        instructions=instructions(code),
        descriptor=parse_descriptor(bytes(raw)),
        args=tuple(Argument(8 * n, 8, "global_buffer", f"a{n}") for n in range(args)),
        max_workgroup_size=1024,
        reqd_workgroup_size=None,
        wavefront_size=64,
        vgpr_count=vgprs,
        agpr_count=0,
        sgpr_count=102,
        vgpr_spills=0,
        sgpr_spills=0,
        lines=NoLines(),
        text_address=0,
    )
    digest = hashlib.sha256(code + bytes(raw)).hexdigest()
    segment = Segment(0, code, 5)
    return CodeObject("<asm>", digest, "gfx950", 5, {"k": found}, (segment,), 0, {})

"""Code objects: what is read from every test kernel, and what is refused."""

import itertools
import struct

import msgpack
import pytest

import gfx950_emu.disassembler as disassembler
from gfx950_emu.code_object import CodeObject, CodeObjectError
from gfx950_emu.debug_line import LineTable
from gfx950_emu.descriptor import parse_descriptor
from gfx950_emu.elf import Elf
from tests.emulator.corpus import BY_NAME, CASES

NAMES = [case.name for case in CASES]
FLYDSL, TRITON = "flydsl_allreduce_flags_4", "triton_softmax_1000"
FLAGS_OFFSET = 48  # of e_flags in an ELF header
SECTION = struct.Struct("<IIQQQQIIQQ")


def load(name):
    compiled = BY_NAME[name].compile()
    return CodeObject.from_bytes(compiled.code_object, name), compiled


def data_of(name):
    return bytearray(BY_NAME[name].compile().code_object)


# Every kernel of the corpus


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_read_whole(name):
    code, compiled = load(name)
    assert list(code.kernels) == [compiled.kernel]
    assert code.target.endswith("gfx950") and code.digest == compiled.digest
    kernel = code.kernels[compiled.kernel]
    assert kernel.instructions[-1].text == "s_endpgm"
    assert {i.size for i in kernel.instructions} <= {4, 8, 12, 16}
    own = [i for i in kernel.instructions if i.pc >= kernel.header_entry]
    for before, after in itertools.pairwise(own):
        assert before.pc + before.size == after.pc
    for i in kernel.instructions:
        assert len(i.raw) == i.size and i.text == " ".join(i.text.split())
    assert kernel.at(kernel.entry).pc == kernel.entry


@pytest.mark.parametrize("name", NAMES)
def test_descriptor_agrees_with_the_metadata(name):
    code, compiled = load(name)
    kernel = code.kernels[compiled.kernel]
    d = kernel.descriptor
    assert kernel.vgpr_count <= d.vgprs <= 512 and kernel.agpr_count <= d.agprs
    # VCC and the like are in the metadata's count: at most a granule is added to it
    assert kernel.sgpr_count <= d.sgprs < kernel.sgpr_count + 2 * 16
    assert d.float_mode.bits == 0xF0 and not d.fp16_ovfl and not d.wave32
    assert sum(size for _, size in d.user_sgprs) <= d.user_sgpr_count
    assert ("kernarg_segment_ptr", 2) in d.user_sgprs and d.workgroup_id_x
    assert kernel.wavefront_size == 64
    visible = [a for a in kernel.args if not a.kind.startswith("hidden")]
    assert len(visible) == len(compiled.arguments)
    assert visible[-1].offset + visible[-1].size <= d.kernarg_bytes
    case = BY_NAME[name]
    assert case.block == compiled.block
    assert case.block[0] == (kernel.reqd_workgroup_size or (kernel.max_workgroup_size,))[0]
    assert compiled.lds_bytes - compiled.dynamic_lds_bytes == d.lds_bytes


@pytest.mark.parametrize("name", NAMES)
def test_branches_end_at_instructions(name):
    code, compiled = load(name)
    kernel = code.kernels[compiled.kernel]
    branches = [i for i in kernel.instructions if i.mnemonic.startswith(("s_branch", "s_cbranch"))]
    for i in branches:
        (offset,) = struct.unpack_from("<h", i.raw)
        kernel.at(i.pc + 4 + 4 * offset)


def test_ranks_and_arguments_of_a_case_agree():
    for case in CASES:
        args = case.make_args(3)
        compiled = case.compile()
        hidden = sum(n in ("global_scratch", "profile_scratch") for n in compiled.arguments)
        assert len(args) == len(case.expected(args)) == case.ranks
        assert all(len(rank) == len(compiled.arguments) - hidden for rank in args), case.name


def test_preload_header_is_stepped_over():
    code, compiled = load(TRITON)
    kernel = code.kernels[compiled.kernel]
    assert kernel.descriptor.preload_length > 0
    assert kernel.entry == kernel.preload_entry == kernel.header_entry + 256
    assert kernel.at(kernel.header_entry).mnemonic.startswith("s_load")
    code, compiled = load(FLYDSL)
    kernel = code.kernels[compiled.kernel]
    assert kernel.preload_entry is None and kernel.entry == kernel.header_entry


def test_functions_that_a_kernel_calls_are_part_of_it():
    code, compiled = load("triton_call")
    kernel = code.kernels[compiled.kernel]
    calls = [i for i in kernel.instructions if i.mnemonic == "s_swappc_b64"]
    assert len(calls) == 2
    functions = [place for name, place in code.symbols.items() if "mix" in name]
    assert functions
    for address, size in functions:
        start = address - code.text_address
        inside = [i for i in kernel.instructions if start <= i.pc < start + size]
        assert sum(i.size for i in inside) == size and inside[-1].mnemonic == "s_setpc_b64"
    assert "mix" not in str(load(TRITON)[0].symbols)


@pytest.mark.parametrize(
    ("name", "file"), [(FLYDSL, "kernels_allreduce.py:"), (TRITON, "kernels_triton.py:")]
)
def test_source_lines(name, file):
    code, compiled = load(name)
    kernel = code.kernels[compiled.kernel]
    places = [kernel.line(i.pc) for i in kernel.instructions]
    assert sum(place is not None and file in place for place in places) > len(places) // 4
    assert kernel.line(10**6) is None


def test_objects_without_lines_say_so():
    from tests.emulator.kernels_flydsl import CASES as flydsl_cases

    assert LineTable().find(0) is None
    elf = Elf(flydsl_cases[0].compile().code_object)
    assert len(LineTable.from_elf(elf).addresses) > 5


def test_image_holds_the_code():
    code, compiled = load(TRITON)
    kernel = code.kernels[compiled.kernel]
    (segment,) = [s for s in code.segments if s.flags & 1]
    for i in kernel.instructions:
        start = code.text_address + i.pc - segment.address
        assert segment.data[start : start + i.size] == i.raw


def test_same_bytes_same_object():
    data = bytes(data_of(FLYDSL))
    assert CodeObject.from_bytes(data) == CodeObject.from_bytes(data)


def test_kernel_names_the_pc_that_is_no_instruction():
    code, compiled = load(FLYDSL)
    with pytest.raises(KeyError, match=f"{compiled.kernel}.*0x2"):
        code.kernels[compiled.kernel].at(2)


# Descriptor


def test_descriptor_fields():
    data = bytearray(64)
    struct.pack_into("<IIIxxxxq", data, 0, 1024, 16, 40, -512)
    rsrc1 = 12 | 5 << 6 | 1 << 12 | 2 << 14 | 1 << 16 | 3 << 18 | 1 << 21 | 1 << 23 | 1 << 26
    rsrc2 = 1 | 10 << 1 | 1 << 7 | 1 << 9 | 2 << 11
    properties, preload = 1 << 0 | 1 << 3, 4 | 2 << 7
    struct.pack_into("<IIIHH", data, 44, 15 | 1 << 16, rsrc1, rsrc2, properties, preload)
    d = parse_descriptor(bytes(data))
    assert (d.lds_bytes, d.scratch_bytes, d.kernarg_bytes, d.entry_offset) == (1024, 16, 40, -512)
    assert (d.vgprs, d.accum_offset, d.agprs, d.sgprs) == (104, 64, 40, 48)
    mode = d.float_mode
    assert (mode.round_32, mode.round_16_64, mode.denorm_32, mode.denorm_16_64) == (1, 2, 1, 3)
    assert mode.bits == 0b11011001
    assert d.ieee and d.dx10_clamp and d.fp16_ovfl and d.tg_split and d.private_segment
    assert (d.workgroup_id_x, d.workgroup_id_y, d.workgroup_id_z) == (True, False, True)
    assert d.workitem_id_dims == 3 and (d.preload_length, d.preload_offset) == (4, 2)
    users = (("private_segment_buffer", 4), ("kernarg_segment_ptr", 2), ("kernarg_preload", 4))
    assert d.user_sgprs == users and d.user_sgpr_count == 10
    struct.pack_into("<I", data, 52, rsrc2 - (1 << 1))
    with pytest.raises(ValueError, match="do not fit"):
        parse_descriptor(bytes(data))
    struct.pack_into("<IH", data, 52, rsrc2, properties | 1 << 10)
    with pytest.raises(ValueError, match="32 lanes"):
        parse_descriptor(bytes(data))
    with pytest.raises(ValueError, match="64 bytes"):
        parse_descriptor(bytes(63))


# Refusals


def section_row(data, name):
    """(offset of its header, section) of a section."""
    elf = Elf(bytes(data))
    (table,) = struct.unpack_from("<Q", data, 40)
    index = next(n for n, s in enumerate(elf.sections) if s.name == name)
    return table + index * SECTION.size, elf.sections[index]


def refused(data, match):
    with pytest.raises(CodeObjectError, match=match) as caught:
        CodeObject.from_bytes(bytes(data), "some.hsaco")
    assert str(caught.value).startswith("some.hsaco: ")
    return str(caught.value)


@pytest.mark.parametrize("data", [b"", b"no ELF file at all", b"\x7fELF\x01\x01" + bytes(60)])
def test_what_is_no_elf_file(data):
    refused(data, "ELF file|cut short")


def test_offload_bundle():
    refused(b"__CLANG_OFFLOAD_BUNDLE__" + bytes(40), "clang-offload-bundler")


@pytest.mark.parametrize("keep", [70, 1000, -900, -64])
def test_cut_files(keep):
    refused(data_of(FLYDSL)[:keep], "cut short")


def test_files_of_another_machine():
    data = data_of(FLYDSL)
    struct.pack_into("<H", data, 18, 62)
    refused(data, "machine 62")


def test_code_of_another_gpu():
    data = data_of(FLYDSL)
    data[FLAGS_OFFSET] = 0x4C  # gfx942
    refused(data, r"another GPU.*0x4c.*gfx950")


def test_unknown_instruction_names_kernel_pc_and_bytes():
    data = data_of(FLYDSL)
    _, text = section_row(data, ".text")
    first = next(i for i in load(FLYDSL)[0].kernels.values()).instructions[3]
    struct.pack_into("<I", data, text.offset + first.pc, 0xFFFFFFFF)
    refused(data, rf"kernel allreduce_flags_4, pc {first.pc:#x}.*ffffffff")


def test_relocations_of_loaded_memory():
    data = data_of(FLYDSL)
    row, text = section_row(data, ".hash")
    fields = list(SECTION.unpack_from(data, row))
    fields[1], fields[5], fields[7] = 4, 24, 0  # RELA, one entry
    SECTION.pack_into(data, row, *fields)
    struct.pack_into("<QQq", data, text.offset, 0x1234, 13, 0)
    refused(data, r"relocation of type 13 at address 0x1234")


def test_missing_note_and_missing_kernel():
    data = data_of(FLYDSL)
    row, note = section_row(data, ".note")
    struct.pack_into("<I", data, row + 4, 1)  # PROGBITS
    refused(data, "no AMDGPU metadata note")
    data = data_of(FLYDSL)
    data[note.offset + 20] ^= 0xFF
    refused(data, "metadata")
    empty = msgpack.packb({"amdhsa.version": [1, 2]})
    data = data_of(FLYDSL)
    struct.pack_into("<I", data, note.offset + 4, len(empty))
    data[note.offset + 20 : note.offset + 20 + len(empty)] = empty
    refused(data, "no kernel")


def test_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setattr(disassembler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(disassembler.ToolchainError, match="pip install rocm-llvm-python=="):
        disassembler.find_library()


def test_broken_library_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "librocmllvm.so").write_text("no library")
    monkeypatch.setattr(disassembler, "find_library", lambda: tmp_path / "librocmllvm.so")
    with pytest.raises(disassembler.ToolchainError, match=r"cannot be used.*pip install"):
        disassembler.Disassembler()

"""Assembly of the opcode checks: a kernel's frame, descriptor, metadata; assembler and linker."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from rocm_msa.flydsl_compile import find_lld
from rocm_msa.selfcheck import opcode_data as data
from tests.emulator.assembler import emit

IN_BYTES = data.SLOTS * data.LANES * 4
SCALARS = data.SCALAR_SLOT * data.LANES * 4

HEADER = f"""
.p2align 8
.globl {{name}}
.type {{name}},@function
{{name}}:
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_load_dwordx2 s[8:9], s[0:1], 0x10
s_waitcnt lgkmcnt(0)
s_mul_i32 s10, s2, {IN_BYTES:#x}
s_add_u32 s4, s4, s10
s_addc_u32 s5, s5, 0
s_mul_i32 s10, s2, {{out_bytes:#x}}
s_add_u32 s6, s6, s10
s_addc_u32 s7, s7, 0
s_mul_i32 s10, s2, {data.MEMORY_BYTES:#x}
s_add_u32 s8, s8, s10
s_addc_u32 s9, s9, 0
s_load_dwordx16 s[20:35], s[4:5], {SCALARS:#x}
v_lshlrev_b32 v1, 2, v0
v_add_u32 v2, 0x1000, v1
v_add_u32 v3, 0x2000, v1
"""
FOOTER = """
.L{name}_end:
.size {name}, .L{name}_end-{name}
.section .rodata,"a",@progbits
.p2align 6
.amdhsa_kernel {name}
.amdhsa_group_segment_fixed_size {lds}
.amdhsa_user_sgpr_kernarg_segment_ptr 1
.amdhsa_user_sgpr_count 2
.amdhsa_system_sgpr_workgroup_id_x 1
.amdhsa_kernarg_size 24
.amdhsa_next_free_vgpr 96
.amdhsa_next_free_sgpr 96
.amdhsa_accum_offset 96
.amdhsa_float_round_mode_32 {round_32}
.amdhsa_float_round_mode_16_64 {round_16_64}
.amdhsa_float_denorm_mode_32 {denorm_32}
.amdhsa_float_denorm_mode_16_64 {denorm_16_64}
.amdhsa_ieee_mode {ieee}
.amdhsa_dx10_clamp {dx10_clamp}
.end_amdhsa_kernel
.text
"""
METADATA = """
- .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: 24
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: 0
    .wavefront_size: 64
    .max_flat_workgroup_size: 64
    .sgpr_count: 96
    .vgpr_count: 96
    .agpr_count: 0
    .args:
      - {{.size: 8, .offset: 0, .value_kind: global_buffer, .address_space: global}}
      - {{.size: 8, .offset: 8, .value_kind: global_buffer, .address_space: global}}
      - {{.size: 8, .offset: 16, .value_kind: global_buffer, .address_space: global}}
"""


def assemble(source: str) -> bytes:
    """The linked code object of an assembly text."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "opcodes.o"), Path(folder, "opcodes.hsaco")
        before.write_bytes(emit(source))
        subprocess.run([str(find_lld()), "-shared", str(before), "-o", str(after)], check=True)
        return after.read_bytes()

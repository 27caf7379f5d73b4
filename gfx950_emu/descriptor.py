"""The 64-byte kernel descriptor of an HSA code object, as gfx90a and later (gfx950) read it.

Layout: "Code Object Kernel Descriptor" of LLVM's "User Guide for AMDGPU Backend".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

DESCRIPTOR_BYTES = 64
PRELOAD_HEADER_BYTES = 256  # skipped when the hardware preloads kernel arguments
VGPR_GRANULE, SGPR_GRANULE, ACCUM_GRANULE = 8, 16, 4

# User SGPRs in the order of the ABI: bit of the properties, name, dwords.
USER_SGPRS = (
    (0, "private_segment_buffer", 4),
    (1, "dispatch_ptr", 2),
    (2, "queue_ptr", 2),
    (3, "kernarg_segment_ptr", 2),
    (4, "dispatch_id", 2),
    (5, "flat_scratch_init", 2),
    (6, "private_segment_size", 1),
)


@dataclass(frozen=True)
class FloatMode:
    """MODE at the start of a wave. Rounding: 0 nearest even, 1 up, 2 down, 3 to zero.

    Denormals: bit 0 keeps those of sources, bit 1 those of results; 3 keeps all.
    """

    round_32: int
    round_16_64: int
    denorm_32: int
    denorm_16_64: int

    @property
    def bits(self) -> int:
        """The low 8 bits of the MODE register."""
        return self.round_32 | self.round_16_64 << 2 | self.denorm_32 << 4 | self.denorm_16_64 << 6


@dataclass(frozen=True)
class Descriptor:
    lds_bytes: int  # static; a launch may add to it
    scratch_bytes: int  # for each lane
    kernarg_bytes: int
    entry_offset: int  # from the descriptor's own address
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    vgprs: int  # allocated for each lane: ordinary and accumulation registers together
    accum_offset: int  # the first of them that is an accumulation register
    sgprs: int  # allocated for each wave, VCC and the like included
    float_mode: FloatMode
    ieee: bool
    dx10_clamp: bool
    fp16_ovfl: bool
    priority: int
    tg_split: bool
    user_sgpr_count: int  # preloaded arguments included
    user_sgprs: tuple[tuple[str, int], ...]  # (name, dwords) in the order of the ABI
    private_segment: bool
    workgroup_id_x: bool
    workgroup_id_y: bool
    workgroup_id_z: bool
    workgroup_info: bool
    workitem_id_dims: int  # 1 to 3 dimensions packed into VGPR0
    preload_length: int  # dwords of kernel arguments
    preload_offset: int  # first dword of the kernel arguments that is preloaded
    wave32: bool
    dynamic_stack: bool

    @property
    def agprs(self) -> int:
        """Allocated accumulation registers."""
        return max(self.vgprs - self.accum_offset, 0)


def field(word: int, low: int, width: int = 1) -> int:
    return word >> low & ((1 << width) - 1)


def parse_descriptor(data: bytes) -> Descriptor:
    """Decode the 64 bytes; ValueError for what no gfx950 kernel can say."""
    if len(data) != DESCRIPTOR_BYTES:
        raise ValueError(f"a kernel descriptor has {DESCRIPTOR_BYTES} bytes, not {len(data)}")
    lds, scratch, kernarg = struct.unpack_from("<III", data, 0)
    (entry,) = struct.unpack_from("<q", data, 16)
    rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", data, 44)
    user_count, preload_length = field(rsrc2, 1, 5), field(preload, 0, 7)
    users = [(name, size) for bit, name, size in USER_SGPRS if field(properties, bit)]
    if preload_length:
        users.append(("kernarg_preload", preload_length))
    # LLVM may count more than it names: the rest is unused and lies before the workgroup ids.
    if sum(size for _, size in users) > user_count:
        raise ValueError(f"user SGPRs {users} do not fit into the {user_count} that it declares")
    if field(properties, 10):
        raise ValueError("the kernel wants waves of 32 lanes, gfx950 has 64")
    return Descriptor(
        lds_bytes=lds,
        scratch_bytes=scratch,
        kernarg_bytes=kernarg,
        entry_offset=entry,
        rsrc1=rsrc1,
        rsrc2=rsrc2,
        rsrc3=rsrc3,
        properties=properties,
        vgprs=(field(rsrc1, 0, 6) + 1) * VGPR_GRANULE,
        accum_offset=(field(rsrc3, 0, 6) + 1) * ACCUM_GRANULE,
        # Twice the granules less one: a gfx9 rule that kept gfx8's unit of 8.
        sgprs=(field(rsrc1, 6, 4) // 2 + 1) * SGPR_GRANULE,
        float_mode=FloatMode(*(field(rsrc1, low, 2) for low in (12, 14, 16, 18))),
        ieee=bool(field(rsrc1, 23)),
        dx10_clamp=bool(field(rsrc1, 21)),
        fp16_ovfl=bool(field(rsrc1, 26)),
        priority=field(rsrc1, 10, 2),
        tg_split=bool(field(rsrc3, 16)),
        user_sgpr_count=user_count,
        user_sgprs=tuple(users),
        private_segment=bool(field(rsrc2, 0)),
        workgroup_id_x=bool(field(rsrc2, 7)),
        workgroup_id_y=bool(field(rsrc2, 8)),
        workgroup_id_z=bool(field(rsrc2, 9)),
        workgroup_info=bool(field(rsrc2, 10)),
        workitem_id_dims=field(rsrc2, 11, 2) + 1,
        preload_length=preload_length,
        preload_offset=field(preload, 7, 9),
        wave32=False,
        dynamic_stack=bool(field(properties, 11)),
    )

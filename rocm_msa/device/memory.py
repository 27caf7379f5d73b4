"""Bytes behind a pointer: global memory with 64-bit offsets, LDS, and wave-uniform loads.

    page = global_bytes(pages).at(fx.Int64(page_id) * stride)     # one 64-bit add
    words = page.load(fx.Uint32, 4, offset=lane * 16)              # global_load_dwordx4
    count = global_bytes(table).uniform(fx.Int32, offset=row * 4)  # s_load_dword
    lds = lds_bytes(2048); lds.store(words, offset=lane * 16)      # ds_write_b128

Offsets are bytes. An int offset goes into the instruction where it fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm
from flydsl.expr import rocdl

LDS_ALIGN, FIRST_ALIGN = 16, 1024
_DYNAMIC = -(2**31)  # LLVM's mark for an index that is a value


@dataclass(frozen=True)
class Bytes:
    """An address, and what is known of its alignment."""

    pointer: ir.Value  # !llvm.ptr of global memory or LDS

    # FlyDSL carries through a loop or branch what a method is called on.
    def __extract_to_ir_values__(self) -> list[ir.Value]:
        return [self.pointer]

    @classmethod
    def __construct_from_ir_values__(cls, values, exemplar=None) -> Bytes:
        return cls(values[0])

    def at(self, offset) -> Bytes:
        """The place `offset` bytes on; an int, Int32 or Int64."""
        dynamic = [] if isinstance(offset, int) else [offset.ir_value()]
        index = offset if isinstance(offset, int) else _DYNAMIC
        byte = ir.IntegerType.get_signless(8)
        flags = ir.Attribute.parse("0 : i32")
        moved = llvm.GEPOp(self.pointer.type, self.pointer, dynamic, [index], byte, flags)
        return Bytes(moved.result)

    def load(self, dtype, count: int = 1, offset=0, *, align: int | None = None, uniform=False):
        """`count` elements of `dtype`: a scalar, or a Vector for count > 1.

        align    bytes, by default those of the whole access
        uniform  the same address in all lanes, in memory that this launch does not write
        """
        kind = dtype.ir_type if count == 1 else fx.Vector.make_type(count, dtype)
        place = self.at(offset) if not isinstance(offset, int) or offset else self
        align = align or min(dtype.width // 8 * count, 16)
        found = llvm.LoadOp(kind, place.pointer, alignment=align, invariant=uniform or None).result
        return dtype(found) if count == 1 else fx.Vector(found, (count,), dtype)

    def store(self, value, offset=0, *, align: int | None = None) -> None:
        """Store a scalar or Vector."""
        size = value.dtype.width // 8 * (value.numel if isinstance(value, fx.Vector) else 1)
        place = self.at(offset) if not isinstance(offset, int) or offset else self
        llvm.StoreOp(value.ir_value(), place.pointer, alignment=align or min(size, 16))

    def uniform(self, dtype, count: int = 1, offset=0, *, align: int = 4):
        """A load into scalar registers (s_load): it does not wait for vector loads in flight.

        The address must be the same in all lanes, and known to be: made of kernel arguments,
        workgroup ids and `wave.uniform` values. Nothing in this launch may write there.
        """
        return self.load(dtype, count, offset, align=align, uniform=True)


def global_bytes(pointer: fx.Pointer) -> Bytes:
    """A pointer argument of the kernel."""
    return Bytes(pointer.llvm_ptr)


def global_address(address: fx.Int64) -> Bytes:
    """Global memory at a 64-bit address, for pointers that lie in memory."""
    kind = fx.PointerType.get(fx.Uint8.ir_type, fx.AddressSpace.Global, LDS_ALIGN)
    return Bytes(fx.inttoptr(kind, address).llvm_ptr)


def lds_bytes(size: int) -> Bytes:
    """The LDS of this kernel as one region of `size` bytes, 16-byte aligned."""
    return lds_regions(size)[0]


def lds_regions(*sizes: int) -> list[Bytes]:
    """The LDS of this kernel as regions of so many bytes, 16-byte aligned; 0 gives None.

    To be called once a kernel. The first region starts at LDS address 0, where an offset that is
    computed needs no addition: give the table that is read most. The compiler takes regions for
    separate memory: an access that leaves its own is an error.
    """
    lds, found = fx.SharedAllocator(), []
    for size in sizes:
        # The compiler lays regions out by alignment, the largest first.
        align = LDS_ALIGN if any(found) else FIRST_ALIGN
        place = lds.allocate(size, align).peek().ptr.llvm_ptr if size else None
        found.append(Bytes(place) if size else None)
    return found


def loads_are_issued() -> None:
    """The compiler moves nothing across this point.

    Without it loads sink to their uses, to spare registers, and every use waits for memory anew.
    """
    rocdl.sched_barrier(0)


def lds_atomic_add(place: Bytes, value: fx.Int32) -> fx.Int32:
    """Add to a word of LDS; what was there before."""
    return fx.atomic_add(place.pointer, value, syncscope="workgroup")


def lds_atomic_or(place: Bytes, value: fx.Int32) -> None:
    """OR into a word of LDS."""
    fx.atomic_or(place.pointer, value, syncscope="workgroup")

"""What a phase works with: arguments, places in memory, the workgroup's own place in the grid."""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir.dialects import llvm

from mono_kernel import plan
from mono_kernel.layer_gfx950 import Build
from mono_kernel.weights import weight_layout
from rocm_msa.device.memory import Bytes, global_address, lds_regions
from rocm_msa.device.wave import Scalars, lane_id, wave_id


class Context:
    """Of one workgroup in one launch.

    s: the build. a: the kernel's arguments by name, pointers as addresses, and what
    device/mailbox.py calls `end`: more than there are scalar registers for. rows: of the batch,
    Int32. workgroup, thread, lane, wave: Int32. table, work, choice, list, own: LDS, `own` being
    `rows` of plan.lds_layout. in_place: plan.in_place of this launch.
    """

    def __init__(self, build: Build, a: Scalars) -> None:
        self.s, self.a = build, a
        self._scratch, self._weights = plan.scratch_layout(build, 1), weight_layout(build)
        self.workgroup, self.workgroups = fx.Int32(fx.block_idx.x), a.workgroups
        self.thread, self.lane, self.wave = fx.thread_idx.x, lane_id(), wave_id()
        self.rows = a.rows
        self.in_place = plan.in_place(build, self.rows, a.most_rows)
        lds = plan.lds_layout(build)
        names = ("table", "work", "choice", "list", "rows")
        self.table, self.work, self.choice, self.list, self.own = lds_regions(
            *[lds[n].nbytes for n in names]
        )

    # FlyDSL carries through a loop or branch what a method is called on: nothing here changes.
    def __extract_to_ir_values__(self) -> list:
        return []

    @classmethod
    def __construct_from_ir_values__(cls, values, exemplar=None) -> Context:
        return exemplar

    def scratch(self, name: str) -> Bytes:
        """A region of scratch."""
        return global_address(self.a.scratch).at(fx.Int64(self._scratch[name].offset))

    def operand(self, name: str, row, size: int, own: bool) -> tuple[Bytes, Bytes]:
        """A row's operand of `size` values, and its factor: this workgroup's own, or the grid's."""
        if own:
            return self.own.at(row * (2 * size)), self.own.at(row * 4 + plan.FEW * 2 * size)
        place = self.scratch(name).at(fx.Int64(row) * (2 * size))
        return place, self.scratch(f"{name}_factor").at(row * 4)

    def weights(self, name: str) -> Bytes:
        """A region of the layer's weights."""
        # Hundreds of megabytes: more than an instruction's or the compiler's constant holds.
        return global_address(self.a.weights).at(fx.Int64(self._weights[name].offset))

    def pointer(self, place: Bytes, dtype) -> fx.Pointer:
        """A place as the pointer that the ops' traced code takes."""
        kind = fx.PointerType.get(dtype.ir_type, fx.AddressSpace.Global, dtype.width // 8)
        return fx.inttoptr(kind, fx.Int64(llvm.ptrtoint(fx.Int64.ir_type, place.pointer)))

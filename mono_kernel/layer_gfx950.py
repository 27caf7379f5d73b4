"""Build parameters and kernel arguments of the layer on gfx950; traced code in layer.py.

Importing this imports no FlyDSL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from mono_kernel import plan
from mono_kernel.batch import Batch
from mono_kernel.shapes import HEAD_DIM, MAX_ROWS, Formats, Shape
from mono_kernel.weights import LUT_FOLD, weight_layout
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.errors import check_tensor, expect
from rocm_msa.ops.flydsl_attend import LOG2E, scales_and_table
from rocm_msa.ops.flydsl_host import keys_of, lut_table

if TYPE_CHECKING:
    import torch

    from rocm_msa.aot import ServingConfig
    from rocm_msa.cache.paged import IndexCache, MainCache
    from rocm_msa.flydsl_compile import Compiled


@dataclass(frozen=True)
class Build(Shape):
    """A rank's share of a layer. phases: how many of plan.PHASES the kernel runs, for tests."""

    phases: int = len(plan.PHASES)

    @classmethod
    def from_shape(cls, shape: Shape, phases: int = len(plan.PHASES)) -> Build:
        return cls(**{f.name: getattr(shape, f.name) for f in fields(Shape)}, phases=phases)

    @property
    def symbol(self) -> str:
        part = "" if self.phases == len(plan.PHASES) else f"_p{self.phases}"
        return f"mono_layer_{self.name}{part}"

    @property
    def grid(self) -> str:
        return "(compute units)"


@dataclass(frozen=True)
class Memory:
    """Buffers of a rank that stay where they are. weights of the layer: weight_layout.

    scratch, state, mailbox: plan's layouts. addresses: int64 [ranks + 1], the ranks' mailboxes and
    a word that the host reads. max_blocks: that the mailboxes were laid out for; for the exchange.
    """

    scratch: torch.Tensor
    state: torch.Tensor
    addresses: torch.Tensor
    rank: int
    patience: int  # milliseconds
    workgroups: int
    max_blocks: int = 1


def arguments(
    build: Build,
    memory: Memory,
    weights: torch.Tensor,
    caches: tuple[MainCache, IndexCache],
    batch: Batch,
    hidden: torch.Tensor,
    residual: torch.Tensor,
    hidden_out: torch.Tensor,
    residual_out: torch.Tensor,
) -> list[Any]:
    """The kernel's arguments, in order; checks them and reads no values.

    Args:
        weights: uint8, LayerWeights.packed(). caches: NVFP4.
        hidden, residual, hidden_out, residual_out: bf16 [rows, hidden], contiguous.
    """
    import torch

    main, index = caches
    max_blocks = batch.block_table.shape[1]
    check_call(
        build, caches, batch, max_blocks,
        hidden=hidden, residual=residual, hidden_out=hidden_out, residual_out=residual_out,
    )  # fmt: skip
    _check("weights", weights, [weight_layout(build).nbytes], torch.uint8)
    scratch = plan.scratch_layout(build, max_blocks).nbytes
    if memory.scratch.numel() < scratch:
        raise ValueError(expect("scratch", f">= {scratch} bytes", memory.scratch.numel()))
    plan.check_workgroups(memory.workgroups, plan.MAX_WORKGROUPS)
    if build.exchange and max_blocks > memory.max_blocks:
        limit = f"<= {memory.max_blocks} (Memory.max_blocks)"
        raise ValueError(expect("block_table.shape[1]", limit, max_blocks))
    k_factor, v_factor, table = scales_and_table(main, hidden.device)
    index_factor, index_table = keys_of(index)
    return [
        hidden, residual, hidden_out, residual_out, weights, memory.scratch,
        main.pages, main.block_stride, main.num_blocks,
        float(main.scales["k"]), float(main.scales["v"]),
        HEAD_DIM**-0.5 * LOG2E * k_factor, v_factor, table,
        index.pages, index.block_stride, index.num_blocks,
        float(index.scales["k"]), index_factor, index_table,
        lut_table(LUT_FOLD, hidden.device),
        batch.block_table, max_blocks, batch.seq_lens, batch.starts,
        batch.positions, batch.main_slots, batch.index_slots,
        batch.seq_lens.shape[0], batch.rows, batch.most_rows,
        batch.cos_sin, batch.cos_sin.shape[0],
        memory.addresses, memory.state, memory.rank, memory.patience, memory.workgroups,
        memory.max_blocks,
    ]  # fmt: skip


def check_call(
    shape: Shape,
    caches: tuple[MainCache, IndexCache],
    batch: Batch,
    max_blocks: int,
    **rows: torch.Tensor,
) -> None:
    """Check what changes from launch to launch; reads no values.

    Args:
        caches: NVFP4. max_blocks: most blocks of a request in the batch's table.
        rows: by name, bf16 [rows, hidden], contiguous.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument that does not fit, by name.
    """
    import torch

    count, requests = batch.rows, batch.seq_lens.shape[0]
    for name, number in (("rows", count), ("requests", requests), ("most_rows", batch.most_rows)):
        if not 1 <= number <= MAX_ROWS:
            raise ValueError(expect(name, f"1..{MAX_ROWS}", number))
    for name, tensor in rows.items():
        _check(name, tensor, [count, shape.hidden], torch.bfloat16)
    for name in ("positions", "main_slots", "index_slots"):
        _check(name, getattr(batch, name), [count], torch.int64)
    _check("block_table", batch.block_table, [requests, "max_blocks"], torch.int32)
    if batch.block_table.shape[1] > max_blocks:
        got = batch.block_table.shape[1]
        raise ValueError(expect("block_table.shape[1]", f"<= {max_blocks}", got))
    _check("seq_lens", batch.seq_lens, [requests], torch.int32)
    _check("starts", batch.starts, [requests + 1], torch.int32)
    _check("cos_sin", batch.cos_sin, ["positions", shape.rotary_dim], torch.float32)
    main, index = caches
    _check_cache("main_cache", main, shape.kv_heads, ("k", "v"))
    _check_cache("index_cache", index, 1, ("k",))


def _check(name: str, x: torch.Tensor, shape: Sequence, dtype) -> None:
    check_tensor(name, x, shape, dtype, align=16 if name not in _UNALIGNED else None)
    if not x.is_contiguous():
        raise ValueError(expect(f"{name}.stride()", "a contiguous tensor", x.stride()))


_UNALIGNED = ("positions", "main_slots", "index_slots", "block_table", "seq_lens", "starts")


def _check_cache(name: str, cache, heads: int, sides: tuple[str, ...]) -> None:
    got = (cache.dtype, cache.kv_heads, cache.head_dim, cache.page.sides)
    wanted = (CacheDType.NVFP4, heads, HEAD_DIM, sides)
    if got != wanted:
        raise NotImplementedError(expect(f"{name} (dtype, heads, head_dim, sides)", wanted, got))
    if cache.block_stride % 16 or cache.pages.data_ptr() % 16:
        raise NotImplementedError(expect(f"{name}.block_stride", "a multiple of 16", "another"))


def builds(config: ServingConfig) -> list[Build]:
    """What serves the layer of a configuration: one kernel for any number of rows up to MAX_ROWS,
    and where the ranks can share the index scan, one that does. Raises ConfigError for a layer that
    it cannot serve."""
    nvfp4 = CacheDType.NVFP4
    served = (config.main_dtype, config.index_dtype, config.dtype) == (nvfp4, nvfp4, "bf16")
    if config.model is None or config.weight_formats is None or not served:
        return []
    shape = Shape.of(config.model, config.ranks, Formats(*config.weight_formats))
    return [Build.from_shape(s) for s in (shape, shape.sharing()) if s is not None]


def compile_build(build: Build) -> Compiled:
    """rocm_msa.flydsl_compile.Compiled of the layer."""
    from mono_kernel.layer import compile_kernel

    return compile_kernel(build)

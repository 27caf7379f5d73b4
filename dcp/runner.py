"""The exchange on GPUs: peer memory and one kernel launch a layer; an api.Exchange.

    exchange = PeerExchange(group, heads, max_rows=180, max_blocks=8192, device="cuda")
    ids = exchange.select(index_q, ..., layer=3, out=ids)     # one launch; may be captured
    exchange.check()                                          # raises what any rank has met
    exchange.close()

Making and closing one is collective. Everything is allocated once, and no address changes. `select`
with `out` neither allocates nor waits nor reads the device, so that it may be captured into a
graph; generations lie on the device and are 64-bit numbers there, so that replays advance them and
nothing ever has to be reset (README.md: why a tag says "this launch").
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any, Protocol

import torch

from dcp.api import DcpError, check_select
from dcp.mailbox_layout import ErrorWord, Geometry
from dcp.plan import Results
from dcp.shard import Shard
from rocm_msa import launcher
from rocm_msa.cache.paged import IndexCache
from rocm_msa.comm.group import as_group
from rocm_msa.comm.peer_memory import PeerMemory
from rocm_msa.comm.runtime import PeerRuntime
from rocm_msa.errors import check_int, expect
from rocm_msa.ops.flydsl_host import keys_of

logger = logging.getLogger(__name__)

BACKENDS = ("flydsl", "triton")
PROTOCOL = 1
"""Changes with the meaning of a byte in the mailboxes."""


class Kernel(Protocol):
    """What a backend's module has; see exchange_triton.run."""

    def run(self, shard: Shard, geometry: Geometry, memory: tuple, *args: Any, **how: Any): ...


class PeerExchange:
    """One rank's end of an exchange between the GPUs of a host; see api.Exchange.

    Args:
        group: a torch.distributed group, or see rocm_msa.comm.group.Group; one rank a GPU, or
            several on one with a `grid` that lets all of them be resident.
        heads: index heads of the model.
        max_rows: of a batch, requests * rows_per_request. max_blocks: of a request.
        device: this rank's GPU.
        topk, head_dim: of every call.
        backend: "flydsl" (gfx950, compiled kernels) or "triton"; None: the first that can run.
        results: form of the results; None: by bytes. The same on all ranks.
        patience_ms: after which the first wait for a peer ends; the last one after four times that.
        grid: workgroups of a launch; None: all that are resident.
        runtime: of the peer memory; None finds torch's.
        times: of exchange_triton.run, for benchmarks.

    Attributes:
        shard, geometry, backend.
        status: the word in host memory that the kernel writes an error to.
        generation: 64-bit number of the next launch, read from the device: waits for it.

    Raises:
        PeerMemoryError: on all ranks alike, with every rank's reasons.
        TypeError, ValueError: arguments that are wrong by themselves; before any rank is asked.
    """

    def __init__(
        self,
        group: Any,
        heads: int,
        *,
        max_rows: int,
        max_blocks: int,
        device: torch.device | str,
        topk: int = 16,
        head_dim: int = 128,
        backend: str | None = None,
        results: Results | None = None,
        patience_ms: int = 5000,
        grid: int | None = None,
        runtime: PeerRuntime | None = None,
        times: torch.Tensor | None = None,
    ) -> None:
        group = as_group(group)
        self.device = _indexed(torch.device(device))
        self.shard = Shard(group.rank, group.ranks, heads)
        check_int("max_blocks", max_blocks, 1)
        check_int("patience_ms", patience_ms, 1)
        if head_dim % 2:
            raise ValueError(expect("head_dim", "even", head_dim))
        slots = self.shard.slots(max_blocks)
        words = slots if results is Results.SCORES else 0
        self.geometry = Geometry(group.ranks, heads, max_rows, slots, topk, head_dim // 2, words)
        self.geometry.check_tags()
        self.backend = _choose(backend, self.device)
        self._kernel = _module(self.backend)
        self._how = {"results": results, "patience_ms": patience_ms, "grid": grid}
        if times is not None:
            self._how["times"] = times
        self._memory = PeerMemory(
            group, self.geometry.mailbox.nbytes, self.device, runtime=runtime,
            terms={
                "protocol": PROTOCOL,
                "backend": self.backend,
                "geometry": self.geometry,
                "layout": _digest(self.geometry),
                "results": results,
                "patience_ms": patience_ms,
            },
        )  # fmt: skip
        self._state = torch.zeros(
            self.geometry.state.nbytes, dtype=torch.uint8, device=self.device
        )  # fmt: skip
        self._generation = self._words("generation")
        self._generation.fill_(1)
        pinned = self.device.type == "cuda"
        self.status = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        places = (*self._memory.addresses, self.status.data_ptr())
        self._addresses = torch.tensor(places, dtype=torch.int64, device=self.device)
        if pinned:
            torch.cuda.synchronize(self.device)  # ready for the first launch, on whatever stream
        logger.info(
            "exchange of %d ranks by %s on %s: %d bytes of mailbox, %d of state",
            *(group.ranks, self.backend, self.device),
            *(self.geometry.mailbox.nbytes, self.geometry.state.nbytes),
        )

    def select(
        self,
        index_q: torch.Tensor,
        index_cache: IndexCache,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        rows_per_request: int,
        num_blocks: torch.Tensor,
        topk: int = 16,
        init_blocks: int = 0,
        local_blocks: int = 1,
        *,
        layer: int = 0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._memory.closed:
            raise RuntimeError("the exchange is closed")
        self.check()
        paging = (index_cache, block_table, seq_lens, rows_per_request, num_blocks)
        return self._run(index_q, *paging, topk, init_blocks, local_blocks, out, layer=layer)

    def prepare(
        self,
        index_q: torch.Tensor,
        index_cache: IndexCache,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        rows_per_request: int,
        num_blocks: torch.Tensor,
        topk: int = 16,
        init_blocks: int = 0,
        local_blocks: int = 1,
        *,
        out: torch.Tensor | None = None,
    ) -> None:
        """Make ready what `select` would launch, on this rank alone.

        To be done on all ranks before the first launch, and before a capture: Triton compiles (who
        still does is late for the others), compiled kernels (flydsl) get the table of NVFP4 values.
        """
        if self.backend == "triton":
            paging = (index_cache, block_table, seq_lens, rows_per_request, num_blocks)
            self._run(index_q, *paging, topk, init_blocks, local_blocks, out, launch=False)
        else:
            keys_of(index_cache)

    def _run(
        self, index_q, index_cache, block_table, seq_lens, rows_per_request, num_blocks, topk,
        init_blocks, local_blocks, out, **how,
    ) -> torch.Tensor:  # fmt: skip
        shard = self.shard
        batch = check_select(
            shard, index_q, index_cache, block_table, seq_lens, rows_per_request, num_blocks,
            topk, init_blocks, local_blocks, out,
        )  # fmt: skip
        if index_q.device != self.device:
            raise ValueError(expect("index_q.device", self.device, index_q.device))
        if out is None:
            shape = (shard.heads_per_rank, batch.rows, topk)
            out = torch.empty(shape, dtype=torch.int32, device=self.device)
        for name, tensor in (("num_blocks", num_blocks), ("out", out)):
            if not tensor.is_contiguous():
                raise ValueError(expect(f"{name}.stride()", "contiguous", tensor.stride()))
        if batch.max_blocks > 1 and block_table.stride(1) != 1:
            raise ValueError(expect("block_table.stride(1)", 1, block_table.stride(1)))
        self._kernel.run(
            shard, self.geometry, (self._addresses, self._state), index_q, index_cache,
            block_table, num_blocks, batch, topk, init_blocks, local_blocks, out,
            **self._how, **how,
        )  # fmt: skip
        return out

    def check(self) -> None:
        """See api.Exchange. The kernel writes the word to host memory: nothing is waited for."""
        error = ErrorWord.parse(int(self.status))
        if error is not None:
            raise DcpError(error.rank, error.peer, error.site, error.generation)

    @property
    def generation(self) -> int:
        return int(self._generation)

    def close(self) -> None:
        """Collective, unless there is an error: then nothing is asked of the others."""
        self._memory.close(wait=int(self.status) == 0)

    def _words(self, name: str) -> torch.Tensor:
        region = self.geometry.state[name]
        return self._state[region.offset : region.end].view(torch.int64)


def _indexed(device: torch.device) -> torch.device:
    """cuda -> cuda:<current>, as tensors have it."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _choose(backend: str | None, device: torch.device) -> str:
    if backend is None:
        return "triton" if launcher.fault(device) else "flydsl"
    if backend not in BACKENDS:
        raise ValueError(expect("backend", " or ".join(BACKENDS), repr(backend)))
    return backend


def _module(backend: str) -> Kernel:
    if backend == "triton":
        from dcp import exchange_triton

        return exchange_triton
    from dcp import exchange_gfx950

    return exchange_gfx950


def _digest(geometry: Geometry) -> str:
    """Of every offset that the ranks must agree on."""
    regions = [(r.name, r.offset, r.nbytes) for layout in (geometry.mailbox, geometry.buffer)
               for r in layout]  # fmt: skip
    return hashlib.sha256(repr(regions).encode()).hexdigest()[:16]

"""Indexer decode context parallelism inside vLLM: who takes it, when, and how a fault ends.

`indexer_decode_cp` makes the ranks of the tensor-parallel group share the index scan of decode
rows (package dcp; docs/decode_cp.md). Each batch is shared or not by `dcp.plan.decide`, from sizes
that all ranks know and a captured graph fixes. The first use of each reason is logged, every call
counted in `taken`. Prefill is never shared.

dcp is imported only where the flag asks for it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rocm_msa import launcher
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.errors import Refusals, check_int, expect
from rocm_msa.vllm_plugin import emulated, kernels, metrics

if TYPE_CHECKING:
    import torch

    from dcp.api import Exchange
    from dcp.plan import Batch, Costs, Scan
    from rocm_msa.cache.paged import IndexCache
    from rocm_msa.vllm_plugin.metadata import Part
    from rocm_msa.vllm_plugin.verify import Options, Serving

logger = logging.getLogger("vllm.rocm_msa")

FLAG = "indexer_decode_cp"

taken: Counter[tuple[str, str]] = Counter()
"""Layer calls with decode rows in this process, by ("shared" | "alone", reason)."""
faults: Counter[tuple[str, ...]] = Counter()
"""Faults of the exchange that this process raised, by (site,)."""

_CPU_TIMEOUT_S = 300.0
"""For one message. Ranks wait for each other in every layer anyway, so they are never far apart."""
_GPU_PATIENCE_MS = 10_000
"""Of the first wait of a launch. Ranks wait for each other in every layer's all-reduce anyway, and
compile nothing of the exchange while they serve (`DecodeCp.prepare`)."""


def asked_for(vllm_config: Any, options: Options) -> bool:
    """Whether the attention config or the additional config asks for it."""
    return options.indexer_decode_cp or getattr(vllm_config.attention_config, FLAG, False)


def check_config(vllm_config: Any, options: Options, index: CacheDType, refusals: Refusals) -> None:
    """Refuse what the exchange was not made for; with one tensor-parallel rank anything goes.

    Args:
        index: dtype of the index cache.
    """
    least = options.indexer_decode_cp_min_blocks
    if least is not None:
        try:
            check_int("additional_config.rocm_msa.indexer_decode_cp_min_blocks", least, 1)
        except (TypeError, ValueError) as error:
            refusals.check(False, str(error))
    parallel = vllm_config.parallel_config
    if not asked_for(vllm_config, options) or parallel.tensor_parallel_size == 1:
        return
    refusals.check(
        parallel.data_parallel_size == 1,
        f"{FLAG}: not tested with data parallelism; "
        + expect("--data-parallel-size", 1, parallel.data_parallel_size),
    )
    if vllm_config.device_config.device_type == "cpu":
        return
    refusals.check(
        parallel.nnodes == 1,
        f"{FLAG}: the ranks write into each other's memory, which needs one host; "
        + expect("--nnodes", 1, parallel.nnodes),
    )
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    served = ("bfloat16",) if index is CacheDType.BF16 else ("bfloat16", "float16")
    refusals.check(
        dtype in served,
        f"{FLAG}: " + expect(f"--dtype with {index.value} index keys", f"one of {served}", dtype),
    )
    refusals.check(
        options.backend != "reference",
        f"{FLAG}: the reference has no exchange between GPUs; "
        + expect("additional_config.rocm_msa.backend", "flydsl, triton or none", options.backend),
    )


def start(serving: Serving, vllm_config: Any) -> DecodeCp | None:
    """This rank's end, when the configuration asks for it; collective in the TP group."""
    if not serving.decode_cp:
        return None
    if serving.rank.tp == 1:
        logger.info("%s has no effect with one tensor-parallel rank", FLAG)
        return None
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    from dcp.plan import MEASURED_H200, Batch, Scan

    model, dtype = serving.model, vllm_config.model_config.dtype
    scan = Scan(serving.index_page.page_bytes, model.index_dim * dtype.itemsize, model.topk_blocks)
    speculative = vllm_config.speculative_config
    most = Batch(
        vllm_config.scheduler_config.max_num_seqs,
        1 + (speculative.num_speculative_tokens if speculative is not None else 0),
        -(-vllm_config.model_config.max_model_len // BLOCK_TOKENS),
    )
    on_cpu = vllm_config.device_config.device_type == "cpu"
    make = _between_processes if on_cpu else _between_gpus
    if serving.options.backend == emulated.BACKEND:
        make = emulated.exchange
    exchange = make(get_tp_group().cpu_group, serving, most, dtype)
    nvidia = make is _between_gpus and torch.version.hip is None
    return DecodeCp(exchange, serving, scan, most, MEASURED_H200 if nvidia else None)


def _between_processes(group: Any, serving: Serving, most: Batch, dtype: torch.dtype) -> Exchange:
    from dcp.gloo import GlooExchange

    return GlooExchange(
        group,
        serving.model.index_heads,
        timeout_s=_CPU_TIMEOUT_S,
        backend=serving.options.backend,
    )


def _between_gpus(group: Any, serving: Serving, most: Batch, dtype: torch.dtype) -> Exchange:
    import torch

    from dcp.runner import PeerExchange

    model = serving.model
    device = torch.device("cuda", torch.cuda.current_device())
    return PeerExchange(
        group,
        model.index_heads,
        max_rows=most.rows,
        max_blocks=most.max_blocks,
        device=device,
        topk=model.topk_blocks,
        head_dim=model.index_dim,
        backend=_gpu_backend(serving, dtype, device),
        patience_ms=_GPU_PATIENCE_MS,
    )


def _gpu_backend(serving: Serving, dtype: torch.dtype, device: torch.device) -> str:
    """What the options say, else compiled kernels where all of them are there, else Triton.

    Raises:
        RuntimeError: backend flydsl without its kernels.
    """
    asked = serving.options.backend
    fault = launcher.fault(device)
    if fault is None and asked != "triton":
        from dcp import exchange_gfx950

        needed = exchange_gfx950.builds(kernels.config_of(serving, dtype))
        missing = launcher.active(device).missing(needed)
        if missing or not needed:
            fault = f"not compiled: {', '.join(missing) or 'any for this configuration'}"
    if asked == "flydsl" and fault is not None:
        raise RuntimeError(f"{FLAG}: backend flydsl: {fault}")
    backend = asked or ("flydsl" if fault is None else "triton")
    reason = "asked for" if asked else fault or "preferred"
    logger.info("%s: the exchange runs on backend %s (%s)", FLAG, backend, reason)
    return backend


class DecodeCp:
    """One rank's end of the exchange, shared by all sparse layers.

    Attributes:
        most: the largest batch that the exchange has room for.
        costs: of this platform, on which the choice rests; None: those modelled for gfx950.
        min_blocks: replaces the computed threshold; None for that.
    """

    def __init__(
        self,
        exchange: Exchange,
        serving: Serving,
        scan: Scan,
        most: Batch,
        costs: Costs | None = None,
    ) -> None:
        from dcp.plan import MODELLED_GFX950

        self.exchange, self.scan, self.most = exchange, scan, most
        self.costs = costs or MODELLED_GFX950
        model = serving.model
        self.kept = (model.topk_blocks, model.init_blocks, model.local_blocks)
        self.min_blocks = serving.options.indexer_decode_cp_min_blocks
        self._logged: set[tuple[str, str]] = set()
        shard = exchange.shard
        logger.info(
            "%s: rank %d of %d scores every block b with b mod %d = %d for %d index heads in "
            "decode batches that are long enough (%s)",
            *(FLAG, shard.rank, shard.ranks, shard.ranks, shard.rank, shard.heads),
            type(exchange).__name__,
        )

    def select(
        self, layer: int, index_q: torch.Tensor, index_cache: IndexCache, part: Part
    ) -> torch.Tensor | None:
        """Blocks of decode rows, int32 `[index_heads, rows, topk]`; None: score them alone.

        The choice is a function of shapes that all ranks share, so that all make the same one.

        Args:
            layer: the layer's number, on which the ranks must agree.
            index_q: `[rows, index_heads, head_dim]`, this rank's heads.
            part: of decode rows.

        Raises:
            DcpError: no selection of this launch may be used; vLLM ends the engine.
        """
        from dcp.plan import Batch, decide

        requests, max_blocks = part.block_table.shape
        batch = Batch(requests, part.rows_per_request, max_blocks)
        decision = decide(self.exchange.shard, batch, self.scan, self.min_blocks, self.costs)
        why = f"the threshold is {decision.threshold} blocks"
        if not decision.shared:
            return self._note("alone", decision.reason, batch, why)
        if batch.rows > self.most.rows or max_blocks > self.most.max_blocks:
            room = f"there is room for {self.most.rows} rows of {self.most.max_blocks} blocks"
            return self._note("alone", "large", batch, room)
        try:
            with self._counting_faults():
                ids = self.exchange.select(
                    index_q,
                    index_cache,
                    part.block_table,
                    part.seq_lens,
                    part.rows_per_request,
                    part.num_blocks,
                    *self.kept,
                    layer=layer,
                )
        except NotImplementedError as error:
            # Of the shapes, before anything is sent: on every rank, or on none.
            return self._note("alone", "unsupported", batch, str(error))
        self._note("shared", decision.reason, batch, why)
        return ids

    def prepare(self, index_cache: IndexCache, dtype: torch.dtype) -> int:
        """Compile what `select` may launch, on this rank alone, between GPUs.

        Args:
            index_cache: one of those that will be scored. dtype: of index queries.

        Returns:
            how many batches that was done for; none from the first on that the kernels refuse.
        """
        import torch

        from dcp.plan import representatives

        shard, device = self.exchange.shard, index_cache.pages.device
        batches = representatives(shard, self.most, self.kept[0])
        for done, batch in enumerate(batches):
            shape = (batch.rows, shard.heads_per_rank, index_cache.head_dim)
            index_q = torch.zeros(shape, dtype=dtype, device=device)
            words = {"dtype": torch.int32, "device": device}
            table = torch.zeros(batch.requests, batch.max_blocks, **words)
            lengths = torch.zeros(batch.requests, **words)
            num_blocks = torch.zeros(batch.rows, **words)
            paging = (index_cache, table, lengths, batch.rows_per_request, num_blocks)
            try:
                self.exchange.prepare(index_q, *paging, *self.kept)
            except NotImplementedError:
                return done
        return len(batches)

    def check(self) -> None:
        """Raise the DcpError that any rank has met so far; once a step, waits for nothing."""
        with self._counting_faults():
            self.exchange.check()

    @contextlib.contextmanager
    def _counting_faults(self) -> Iterator[None]:
        from dcp.api import DcpError

        try:
            yield
        except DcpError as error:
            faults[(error.site.name,)] += 1
            metrics.publish()  # the process ends before the next time
            raise

    def _note(self, path: str, reason: str, batch: Batch, why: str) -> None:
        """Count a call; say why, the first time."""
        taken[path, reason] += 1
        if (path, reason) not in self._logged:
            self._logged.add((path, reason))
            logger.info(
                "%s: decode batch %s (%s): %d requests x %d rows of up to %d blocks; %s. Said once",
                *(FLAG, path, reason, batch.requests, batch.rows_per_request, batch.max_blocks),
                why,
            )

"""The mono kernel inside vLLM: which steps take it, with what weights, and how a fault ends.

With the flag `mono` (docs/mono.md), a step of at most 16 rows, however they are shared out among
requests, runs every layer of sparse attention and experts as one launch of mono_kernel; every other
step takes the ordinary layers. Both read and write the same caches, hidden states and residual, so
that they follow each other within a request. `path_of` decides from sizes that all ranks of the
group share. Each step is counted in `steps`, the first of each reason logged.

mono_kernel is imported only where the flag asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group
from vllm.forward_context import get_forward_context

from rocm_msa import launcher
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.config_read import as_dict
from rocm_msa.vllm_plugin import emulated, metrics
from rocm_msa.vllm_plugin.mono_config import BUILD_COMMAND, FLAG

if TYPE_CHECKING:
    from mono_kernel.batch import Batch
    from mono_kernel.shapes import Shape
    from mono_kernel.weights import LayerWeights
    from rocm_msa.vllm_plugin.attention import MsaAttention
    from rocm_msa.vllm_plugin.metadata import MsaMetadata, Part
    from rocm_msa.vllm_plugin.mono_loading import LayerCollector
    from rocm_msa.vllm_plugin.verify import Options, Serving

logger = logging.getLogger("vllm.rocm_msa")

steps: Counter[tuple[str, str]] = Counter()
"""Steps in this process by ("mono" | "layers", reason)."""
faults: Counter[tuple[str, ...]] = Counter()
"""Launches that failed, by (site,), counted where they were first seen in this process."""

_CPU_TIMEOUT_S = 300.0
"""For one message. The ranks wait for each other in every layer anyway."""
_GPU_PATIENCE_MS = 20_000
"""Of a wait for one missing peer; beyond what a rank may be behind another."""


@dataclass(frozen=True)
class StepSize:
    """What every rank of the group knows alike of a step, without a look at the device.

    tokens: rows of the hidden states. requests, rows: of the step. most_rows: bound of a request's;
    1 where none has more. ragged: not all are known to have equally many. max_blocks: width of the
    block table.
    """

    tokens: int
    requests: int
    rows: int
    most_rows: int
    ragged: bool
    max_blocks: int


def path_of(
    size: StepSize | None, most_rows: int, most_blocks: int, share_from: int | None = None
) -> tuple[str, str]:
    """("mono" | "layers", why) of a step; None is a step without caches, as in profiling.

    Args:
        share_from: blocks from which the ranks share the index scan; None: they never do.
    """
    if size is None or not size.requests:
        return "layers", "profile"
    if max(size.tokens, size.rows, size.requests) > most_rows:
        return "layers", "prefill" if size.ragged else "rows"
    if size.max_blocks > most_blocks:
        return "layers", "blocks"
    if share_from is not None and size.max_blocks >= share_from:
        return "mono", "shared"
    return "mono", "ragged" if size.ragged else "decode"


def start(serving: Serving, vllm_config: Any, attention: list[MsaAttention]) -> Mono | None:
    """This rank's end, when the configuration asks for it; collective in the TP group.

    Args:
        attention: of all layers, by number.
    """
    shape = serving.mono
    if shape is None:
        return None
    from mono_kernel.checkpoint_formats import mono_layers

    max_blocks = -(-vllm_config.model_config.max_model_len // BLOCK_TOKENS)
    if serving.options.backend == emulated.BACKEND:
        make = emulated.mono_runner
    elif vllm_config.device_config.device_type == "cpu":
        make = _between_processes
    else:
        make = _between_gpus
    group, sharing = get_tp_group().cpu_group, None
    runner = make(group, shape, max_blocks)
    # The reference gives the bits of the shared scan by scanning alone.
    if serving.decode_cp and make is not _between_processes and shape.sharing() is not None:
        sharing = make(group, shape.sharing(), max_blocks)
    numbers = mono_layers(serving.model)
    layers = {number: attention[number] for number in numbers}
    mono = Mono(shape, runner, layers, max_blocks, sharing, serving.options)
    logger.info(
        "%s: steps of up to %d rows run %d layers as one launch each (%s, the index scan of "
        "long contexts %s)",
        *(FLAG, mono.most_rows, len(numbers), type(runner).__name__),
        "by each rank alone" if sharing is None else "shared by the ranks",
    )
    return mono


def _between_processes(group: Any, shape: Any, max_blocks: int) -> Any:
    from mono_kernel.gloo import GlooRunner

    return GlooRunner(group, shape, max_blocks=max_blocks, timeout_s=_CPU_TIMEOUT_S)


def _between_gpus(group: Any, shape: Any, max_blocks: int) -> Any:
    from mono_kernel.layer_gfx950 import Build
    from mono_kernel.runner import MonoRunner

    device = torch.device("cuda", torch.cuda.current_device())
    fault = launcher.fault(device)
    if fault is None:
        lacks = launcher.active(device).missing([Build.from_shape(shape)])
        fault = f"not compiled: {lacks[0]}" if lacks else None
    if fault is not None:
        raise RuntimeError(f"{FLAG}: {fault}; to build it: {BUILD_COMMAND}")
    return MonoRunner(
        group, shape, max_blocks=max_blocks, device=device, patience_ms=_GPU_PATIENCE_MS
    )


def collector(
    mono: Mono | None, serving: Serving, text_config: Any, quantisation: Any
) -> LayerCollector | None:
    """What takes the layers' weights from the checkpoint's tensors as they pass by.

    Args:
        text_config: of transformers. quantisation: the checkpoint's `quantization_config`, or None.
    """
    if mono is None:
        return None
    from rocm_msa.vllm_plugin.mono_loading import LayerCollector

    config = as_dict(text_config) | {"quantization_config": quantisation}
    return LayerCollector(mono, serving.mono, get_tensor_model_parallel_rank(), config)


class Mono:
    """One rank's end, shared by all its layers.

    Args:
        shape: this rank's share of a layer.
        runner: mono_kernel.runner.MonoRunner or mono_kernel.gloo.GlooRunner.
        layers: attention of the layers that may run as one launch, by number.
        most_blocks: most blocks of a request.
        sharing: a runner whose ranks share the index scan, for long contexts; or None.
        options: for `indexer_decode_cp_min_blocks`.
    """

    def __init__(
        self,
        shape: Shape,
        runner: Any,
        layers: Mapping[int, MsaAttention],
        most_blocks: int,
        sharing: Any = None,
        options: Options | None = None,
    ) -> None:
        from mono_kernel.shapes import MAX_ROWS

        self.shape, self.runner, self.sharing = shape, runner, sharing
        self.layers = dict(layers)
        self.most_rows, self.most_blocks = MAX_ROWS, most_blocks
        self.min_blocks = None if options is None else options.indexer_decode_cp_min_blocks
        self.weights: dict[int, Any] = {}
        self._logged: set[tuple[str, str]] = set()

    def load(self, number: int, weights: LayerWeights) -> None:
        """Take the weights of a layer."""
        self.weights[number] = self.runner.load(weights)

    def check(self) -> None:
        """Raise the MonoError of an earlier launch, of this rank or another; waits for nothing.

        The metadata builder does so in every step, also where a captured graph stands for `begin`.
        """
        with self._counting_faults():
            for runner in (self.runner, self.sharing):
                if runner is not None:
                    runner.check()

    def begin(self, positions: torch.Tensor, hidden: torch.Tensor) -> Step | None:
        """What runs this step's layers; None: the ordinary layers do.

        Args:
            positions: int64 `[tokens]`. hidden: `[tokens, hidden]`, of the first layer.

        Raises:
            MonoError: see `check`.
        """
        self.check()
        metadata, slots = self._of_this_step()
        size = None if metadata is None else size_of(metadata, hidden.shape[0])
        path, reason = path_of(size, self.most_rows, self.most_blocks, self._share_from(size))
        self._note(path, reason, size)
        if path != "mono":
            return None
        runner = self.sharing if reason == "shared" else self.runner
        return Step(self, runner, positions, slots, metadata, size)

    def _share_from(self, size: StepSize | None) -> int | None:
        if self.sharing is None or size is None or not size.requests:
            return None
        if self.min_blocks is not None:
            return self.min_blocks
        from mono_kernel.plan import exchange_threshold

        return exchange_threshold(self.shape, size.requests, size.rows)

    def run(
        self,
        runner: Any,
        number: int,
        batch: Batch,
        hidden: torch.Tensor,
        residual: torch.Tensor,
    ) -> tuple:
        """(hidden, residual) `[rows, hidden]` behind a layer, new tensors."""
        attention = self.layers[number]
        caches = (attention.cache, attention.index_cache.cache)
        outs = torch.empty_like(hidden), torch.empty_like(hidden)
        with self._counting_faults():
            runner.run(self.weights[number], caches, batch, hidden, residual, *outs)
        return outs

    def _of_this_step(self) -> tuple[MsaMetadata | None, Mapping[str, torch.Tensor]]:
        context = get_forward_context()
        metadata, slots = context.attn_metadata, context.slot_mapping
        name = next(iter(self.layers.values())).layer_name
        if isinstance(slots, dict) and name in slots and isinstance(metadata, dict):
            return metadata[name], slots
        return None, {}

    def _note(self, path: str, reason: str, size: StepSize | None) -> None:
        """Count a step; say why, the first time."""
        steps[path, reason] += 1
        if (path, reason) not in self._logged:
            self._logged.add((path, reason))
            logger.info("%s: step %s (%s): %s. Said once", FLAG, path, reason, size)

    @contextlib.contextmanager
    def _counting_faults(self) -> Iterator[None]:
        from mono_kernel.faults import MonoError, site_name

        try:
            yield
        except MonoError as error:
            faults[(site_name(error.site),)] += 1
            metrics.publish()  # the process ends before the next time
            raise


class Step:
    """A step on the mono path."""

    def __init__(
        self,
        mono: Mono,
        runner: Any,
        positions: torch.Tensor,
        slots: Mapping[str, torch.Tensor],
        metadata: MsaMetadata,
        size: StepSize,
    ) -> None:
        self.mono, self.runner, self.size = mono, runner, size
        self.positions, self.slots = positions, slots
        self.paging = _paging(metadata)

    def layer(self, number: int) -> Any:
        """`(positions, hidden, residual) -> (hidden, residual)` of a layer; None: the ordinary."""
        return functools.partial(self._run, number) if number in self.mono.layers else None

    def _run(
        self, number: int, _: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple:
        if residual is None:
            residual = torch.zeros_like(hidden)
        rows = slice(self.size.rows)
        batch, tail = self._batch(number), hidden.shape[0] - self.size.rows
        outs = self.mono.run(self.runner, number, batch, hidden[rows], residual[rows])
        return tuple(F.pad(out, (0, 0, 0, tail)) for out in outs) if tail else outs

    def _batch(self, number: int) -> Batch:
        from mono_kernel.batch import Batch

        attention = self.mono.layers[number]
        rows = slice(self.size.rows)  # what vLLM gives may be longer
        return Batch(
            self.positions[rows],
            self.slots[attention.layer_name][rows],
            self.slots[attention.index_cache.layer_name][rows],
            *self.paging,
            self.size.most_rows,
            attention.rotary_emb.cos_sin_cache,
        )


def _parts(metadata: MsaMetadata) -> list[Part]:
    return [part for part in (metadata.decode, metadata.prefill) if part is not None]


def _paging(metadata: MsaMetadata) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(block_table, seq_lens, starts) of mono_kernel.batch.Batch."""
    parts = _parts(metadata)
    if len(parts) == 1:
        return parts[0].block_table.contiguous(), parts[0].seq_lens, parts[0].cu_seqlens_q
    decode, prefill = parts
    return (
        torch.cat([decode.block_table, prefill.block_table]),
        torch.cat([decode.seq_lens, prefill.seq_lens]),
        torch.cat([decode.cu_seqlens_q, prefill.cu_seqlens_q[1:] + prefill.tokens.start]),
    )


def size_of(metadata: MsaMetadata, tokens: int) -> StepSize:
    """tokens: rows of the hidden states, padding included."""
    parts = _parts(metadata)
    if not parts:
        return StepSize(tokens, 0, 0, 0, False, 0)
    requests, blocks = sum(p.block_table.shape[0] for p in parts), parts[0].block_table.shape[1]
    rows, per = parts[-1].tokens.stop, parts[-1].rows_per_request
    return StepSize(tokens, requests, rows, per or rows, per is None, blocks)

"""vLLM's own graph manager of model runner V2 over recorded graphs, on an engine in this process.

    with engine(...) as llm:
        steps = Steps(runner_of(llm), sizes=(4, 2))
        steps.capture()
        out = steps.replayed([Request(table, 129), ...])

The manager, the input buffers, the dummy batches of a capture, dispatch and the model's state are
vLLM's code (vllm/v1/worker/gpu); torch.cuda's graphs are RecordedGraph. A real step's buffers are
filled here as prepare_inputs and prepare_attn of its runner do: what lies behind the step's
requests is length 0, slot -1 and positions that are left over; their tables name no block at all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states import init_model_state

from rocm_msa import launcher, ops
from rocm_msa.ops import attention_checks, dispatch, rows
from rocm_msa.ops.block_topk import api as topk_api
from rocm_msa.ops.qkv_insert import api as insert_api
from rocm_msa.vllm_plugin.moe import CpuExperts
from tests.vllm_plugin.recorded_graph import RecordedGraph, kernel

BLOCK = 128
NO_BLOCK = 2**30  # of a table's entries that no row may read; vLLM leaves old ids there, or 0


@dataclass(frozen=True)
class Request:
    """blocks: ids of its table. length: tokens with this step's. tokens: this step's, of any id."""

    blocks: Sequence[int]
    length: int
    tokens: Sequence[int]


class DummyTables:
    """vLLM's BlockTables, as far as a capture asks it; its own is made for a GPU."""

    cp_size = 1

    def __init__(self, max_num_reqs: int, width: int, max_num_tokens: int) -> None:
        self.tables = torch.zeros(max_num_reqs, width, dtype=torch.int32)
        self.slots = torch.zeros(1, max_num_tokens, dtype=torch.int64)

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        self.tables.zero_()
        return (self.tables[:num_reqs],)

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        self.slots.fill_(-1)
        return self.slots[:, :num_tokens]


class Steps:
    """Decode steps of an engine's model.

    Args:
        runner: vLLM's model runner on the CPU, which has the model and its caches.
        sizes: of vLLM's cudagraph_capture_sizes, in tokens. query: tokens of a decoding request.
    """

    def __init__(self, runner, sizes: Sequence[int], query: int = 1) -> None:
        self.config, self.model = runner.vllm_config, runner.get_model()
        self.kv, self.groups = runner.kv_cache_config, runner.attn_groups
        emulator = launcher.offered(dispatch.EMULATED)
        self.gpu = None if emulator is None else emulator.gpu
        scheduler = self.config.scheduler_config
        requests = scheduler.max_num_seqs
        width = -(-self.config.model_config.max_model_len // BLOCK) + 1  # room for drafts
        self.buffers = InputBuffers(requests, 64, torch.device("cpu"))
        self.tables = DummyTables(requests, width, 64)
        self.state = init_model_state(self.config, self.model, None, torch.device("cpu"))
        compilation = self.config.compilation_config
        compilation.cudagraph_capture_sizes = sorted(sizes)
        compilation.max_cudagraph_capture_size = max(sizes)
        with self._graphs():
            self.manager = cudagraph_utils.ModelCudaGraphManager(
                self.config,
                torch.device("cpu"),
                CUDAGraphMode.FULL_DECODE_ONLY,
                decode_query_len=query,
            )

    @contextlib.contextmanager
    def _graphs(self) -> Iterator[None]:
        """torch.cuda's graphs are recorded ones, and values of tensors are on no host."""
        make = functools.partial(RecordedGraph, self.gpu, self._error_words())
        platform = SimpleNamespace(get_global_graph_pool=lambda: None)
        dense = ops.dense_attention  # in the emulator its reference, elsewhere Triton's kernel
        dense = dense if self.gpu is None else kernel(dense, "out")
        with contextlib.ExitStack() as stack:
            for where, name, value in (
                (cudagraph_utils, "graph_capture", lambda device: contextlib.nullcontext()),
                (cudagraph_utils, "capture_pool", lambda *_: contextlib.nullcontext()),
                (cudagraph_utils, "current_stream", lambda: None),
                (cudagraph_utils, "current_platform", platform),
                (torch.cuda, "CUDAGraph", make),
                (torch.cuda, "graph", lambda graph, *_, **__: graph.capturing()),
                (ops, "dense_attention", dense),
                (CpuExperts, "forward", _experts(CpuExperts.forward)),
                *((m, "on_host", lambda tensor: False) for m in _CHECKING),
            ):
                stack.enter_context(mock.patch.object(where, name, value))
            stack.enter_context(set_current_vllm_config(self.config))
            yield

    @torch.inference_mode()
    def capture(self) -> None:
        """Every size, warm-up first, as vLLM does at start."""
        with self._graphs():
            self.manager.capture(
                self.model,
                self.state,
                self.buffers,
                None,
                self.tables,
                self.groups,
                self.kv,
                use_aux_hidden_state_outputs=bool(self.model.model.aux_hidden_state_layers),
            )

    def _error_words(self) -> list[torch.Tensor]:
        """In host memory, where a step may read."""
        mono, cp = self.model.model.mono, self.model.model.layers[0].self_attn.decode_cp
        ends = [mono.runner, mono.sharing] if mono else []
        ends += [cp.exchange] if cp else []
        return [end.status for end in ends if end is not None]

    @property
    def graphs(self) -> list[tuple[int, int]]:
        """(requests, tokens) of the captured graphs."""
        return [(d.num_reqs, d.num_tokens) for d in self.manager.graphs]

    @torch.inference_mode()
    def replayed(self, requests: Sequence[Request]) -> torch.Tensor:
        """Hidden states of the step's rows, by the graph that vLLM chooses.

        With auxiliary ones behind them, where the model gives some to a drafter.
        """
        found = self.dispatched(requests)
        assert found.cg_mode == CUDAGraphMode.FULL, found
        with self._graphs():
            self._metadata(requests, found.num_reqs, found.num_tokens, CUDAGraphMode.FULL)
            out = self.manager.run_fullgraph(found)
        return _rows(out, requests)

    def dispatched(self, requests: Sequence[Request]):
        """vLLM's BatchExecutionDescriptor for these requests."""
        each = {len(r.tokens) for r in requests}
        tokens = sum(len(r.tokens) for r in requests)
        uniform = each.pop() if len(each) == 1 else None
        return self.manager.dispatch(len(requests), tokens, uniform, 0, None)

    @torch.inference_mode()
    def eager(self, requests: Sequence[Request], padded: bool = False) -> torch.Tensor:
        """The same without a graph. padded: with the rows of padding that its graph has."""
        size = (len(requests), sum(len(r.tokens) for r in requests))
        mode = CUDAGraphMode.NONE
        if padded:
            found = self.dispatched(requests)
            size, mode = (found.num_reqs, found.num_tokens), CUDAGraphMode.FULL
        with self._graphs(), mock.patch.object(type(self.model.model.replays), "replayed"):
            metadata, slots = self._metadata(requests, *size, mode)
            with set_forward_context(metadata, self.config, num_tokens=size[1], slot_mapping=slots):
                out = self.model(
                    self.buffers.input_ids[: size[1]], self.buffers.positions[: size[1]]
                )
        return _rows(out, requests)

    def _metadata(self, requests, num_reqs: int, num_tokens: int, mode: CUDAGraphMode):
        """Fill the buffers, then vLLM's metadata of the step and the slots of each layer."""
        b, live = self.buffers, len(requests)
        each = np.array([len(r.tokens) for r in requests], dtype=np.int32)
        total = int(each.sum())
        starts = np.full(b.max_num_reqs + 1, total, dtype=np.int32)
        starts[0], starts[1 : live + 1] = 0, each.cumsum()
        b.query_start_loc.copy_(torch.from_numpy(starts))
        b.seq_lens.zero_()
        self.tables.tables.fill_(NO_BLOCK)
        self.tables.slots.fill_(-1)
        for i, (r, start) in enumerate(zip(requests, starts, strict=False)):
            rows_of = slice(start, start + len(r.tokens))
            positions = torch.arange(r.length - len(r.tokens), r.length)
            b.input_ids[rows_of] = torch.tensor(r.tokens, dtype=torch.int32)
            b.positions[rows_of], b.seq_lens[i] = positions, r.length
            table = torch.tensor(r.blocks, dtype=torch.int32)
            self.tables.tables[i, : len(table)] = table
            slots = table.long()[positions // BLOCK] * BLOCK + positions % BLOCK
            self.tables.slots[0, rows_of] = slots
        bound = torch.zeros(num_reqs, dtype=torch.int32)
        bound[:live] = torch.tensor([r.length for r in requests])
        zeros = np.zeros(num_reqs, dtype=np.int32)
        batch = mock.Mock(
            spec=InputBatch,
            num_reqs=live,
            num_reqs_after_padding=num_reqs,
            num_tokens=total,
            num_tokens_after_padding=num_tokens,
            query_start_loc=b.query_start_loc[: num_reqs + 1],
            query_start_loc_np=starts[: num_reqs + 1],
            num_scheduled_tokens=each,
            max_query_len=None,
            seq_lens=b.seq_lens[:num_reqs],
            seq_lens_cpu_upper_bound=bound,
            is_prefilling_np=zeros[:live].astype(bool),
            positions=b.positions[:num_tokens],
            idx_mapping_np=zeros,
            dcp_local_seq_lens=None,
            dcp_local_seq_lens_cpu_upper_bound=None,
            pcp=None,
            prompt_lens=None,
            fast_prefill=None,
        )
        slots = self.tables.slots[:, :num_tokens]
        tables = (self.tables.tables[:num_reqs],)
        metadata = self.state.prepare_attn(batch, mode, tables, slots, self.groups, self.kv)
        return metadata, build_slot_mappings_by_layer(slots, self.kv)

    # --- caches ---

    def caches(self) -> list[torch.Tensor]:
        """Pages of every cache, main and index."""
        layers = self.config.compilation_config.static_forward_context.values()
        return [layer.cache.pages for layer in layers if hasattr(layer, "cache")]

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Afterwards the caches hold what they held before."""
        before = [pages.clone() for pages in self.caches()]
        yield
        for pages, old in zip(self.caches(), before, strict=True):
            pages.copy_(old)


def _rows(out, requests: Sequence[Request]) -> torch.Tensor:
    """The live rows of a model's output, `[tokens, hidden]` or that and a list of more, as one."""
    hidden, more = out if isinstance(out, tuple) else (out, [])
    return torch.cat([hidden, *more], 1)[: sum(len(r.tokens) for r in requests)].clone()


_CHECKING = [
    m for m in (dispatch, rows, attention_checks, topk_api, insert_api) if hasattr(m, "on_host")
]
"""Modules that look at the values of CPU tensors, as they never do on a GPU."""


def _experts(forward):
    """vLLM's experts are kernels on a GPU."""
    plain = kernel(lambda x, *rest, of: forward(of, x, *rest))

    def run(self, x, *rest):
        return plain(x, *rest, of=self)

    return run


def runner_of(llm):
    """The model runner of an engine in this process."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


# --- steps that are compared ---

STARTS = {"a": 125, "b": 2044, "c": 1, "d": 250, "e": 600}
"""Tokens of each request before its first step: the next steps cross the edges of blocks, and of
the list of 16 blocks."""
ROOM = 4  # blocks more than a start needs
BATCHES = ["abcde", "abcd", "abc", "c", "bad", "ec", "a"]
"""Requests of each step: full sizes and padded ones, larger batches before smaller ones."""


def tables() -> dict[str, range]:
    """Blocks of each request, of its own; block 0 is vLLM's null block."""
    found, first = {}, 1
    for name, start in STARTS.items():
        found[name] = range(first, first + start // BLOCK + ROOM)
        first = found[name].stop
    return found


@dataclass
class Served:
    """An engine's steps, and each request's tokens so far."""

    steps: Steps
    rows: int
    lengths: dict[str, int]

    def batch(self, names: str) -> list[Request]:
        """The next step of these requests."""
        made = []
        for name in names:
            self.lengths[name] += self.rows
            tokens = [(7 * self.lengths[name] + i) % 900 + 3 for i in range(self.rows)]
            made.append(Request(tables()[name], self.lengths[name], tokens))
        return made

    def begin(self) -> None:
        self.lengths.update(STARTS)
        generator = torch.Generator().manual_seed(1)
        for pages in self.steps.caches():
            # Any bytes are NVFP4 values; scales of up to 2 keep the activations small.
            pages.copy_(torch.randint(0, 64, pages.shape, generator=generator))


def check_step(steps: Steps, requests: list[Request]) -> None:
    """A replay, and twice without a graph: with the graph's padding and without any."""
    found = []
    for run in (lambda: steps.eager(requests), lambda: steps.eager(requests, padded=True)):
        with steps.undone():
            found.append((run(), [pages.clone() for pages in steps.caches()]))
    out = steps.replayed(requests)
    assert torch.isfinite(out).all()
    for hidden, pages in found:
        assert torch.equal(out, hidden)
        for got, wanted in zip(steps.caches(), pages, strict=True):
            assert torch.equal(got, wanted)

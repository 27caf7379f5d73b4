"""The plugin's decode step in a real CUDA graph: metadata, insertion, selection, attention.

Attention layers and metadata builder are the plugin's own, on Triton kernels; vLLM is replaced by
empty classes where it is not installed (vllm_stubs.py), and linears are plain products. Graphs are
captured with dummy batches as vLLM's runner V2 makes them, and replayed with other requests,
padded: the bits of the same steps without a graph, hidden states and caches.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rocm_msa import launcher, ops
from rocm_msa.cache import IndexCache, MainCache, index_page, main_page
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.ops import dispatch, flydsl_host
from tests.gpu import vllm_stubs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DEVICE = "cuda"
BLOCK, DIM, Q_HEADS, TOPK, HIDDEN = 128, 128, 16, 16, 512
MODEL_LEN, PAGES, REQUESTS = 32_768, 700, 8
LAYERS = (False, True, True)  # sparse
HEADS = {sparse: ops.Heads(Q_HEADS, 1, int(sparse), DIM, 64) for sparse in (False, True)}


def make_layer(number: int, sparse: bool, dtype: str):
    """An MsaAttention as a rank of four has it, without what vLLM gives it."""
    from rocm_msa.vllm_plugin.attention import MsaAttention

    class Layer(MsaAttention):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def norms(self) -> ops.Norms:
            return ops.Norms(*weights[: 4 if sparse else 2])

    kind = CacheDType.parse(dtype)
    pages = [
        torch.randint(0, 64, (PAGES, page.page_bytes), dtype=torch.uint8, device=DEVICE)
        for page in (main_page(1, DIM, kind), index_page(DIM, kind))
    ]
    weights = [torch.randn(DIM, device=DEVICE).bfloat16() * 0.1 for _ in range(4)]
    angles = torch.arange(MODEL_LEN, device=DEVICE)[:, None] * torch.logspace(0, -5, 32).to(DEVICE)
    layer = Layer()
    layer.layer_id, layer.layer_name, layer.sparse = number, f"{number}.attn", sparse
    layer.heads, layer.sm_scale, layer.decode_cp = HEADS[sparse], DIM**-0.5, None
    layer.serving = SimpleNamespace(
        model=SimpleNamespace(topk_blocks=TOPK, init_blocks=0, local_blocks=1),
        options=SimpleNamespace(backend="triton"),
    )
    layer.rotary_emb = SimpleNamespace(cos_sin_cache=torch.cat([angles.cos(), angles.sin()], 1))
    layer.cache = MainCache.from_tensor(pages[0], 1, dtype)
    layer.index_cache = SimpleNamespace(cache=IndexCache.from_tensor(pages[1], dtype))
    layer.select_counters = torch.zeros(REQUESTS, dtype=torch.int32, device=DEVICE)
    return layer


class Steps:
    """Decode steps of three layers, in buffers as vLLM's runner V2 keeps them."""

    def __init__(self, dtype: str, rows: int) -> None:
        from rocm_msa.vllm_plugin.metadata import MsaMetadataBuilder

        torch.manual_seed(rows)
        self.rows = rows
        self.layers = [make_layer(i, sparse, dtype) for i, sparse in enumerate(LAYERS)]
        tokens = REQUESTS * rows
        config = SimpleNamespace(
            rows=rows,
            scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        self.builder = MsaMetadataBuilder(None, [], config, torch.device(DEVICE))
        ints = {"dtype": torch.int32, "device": DEVICE}
        self.table = torch.zeros(REQUESTS, MODEL_LEN // BLOCK + 1, **ints)
        self.lens, self.starts = torch.zeros(REQUESTS, **ints), torch.zeros(REQUESTS + 1, **ints)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
        self.slots = torch.full((tokens,), -1, dtype=torch.int64, device=DEVICE)
        self.hidden = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
        self.weights = [
            [
                (torch.randn(*shape, device=DEVICE) * shape[0] ** -0.5).bfloat16()
                for shape in ((HIDDEN, HEADS[sparse].qkv_columns), (Q_HEADS * DIM, HIDDEN))
            ]
            for sparse in LAYERS
        ]

    def metadata(self, requests: int, longest: int, capture: bool = False):
        tokens = requests * self.rows
        common = SimpleNamespace(
            num_reqs=requests, num_actual_tokens=tokens, max_query_len=self.rows,
            max_seq_len=longest, block_table_tensor=self.table[:requests],
            seq_lens=self.lens[:requests], query_start_loc=self.starts[: requests + 1],
        )  # fmt: skip
        if capture:
            return self.builder.build_for_cudagraph_capture(common)
        return self.builder.build(0, common)

    def run(self, metadata) -> torch.Tensor:
        """Hidden states behind the layers."""
        tokens = metadata.num_tokens
        hidden = self.hidden[:tokens]
        for layer, (project, output) in zip(self.layers, self.weights, strict=True):
            out = torch.zeros(tokens, Q_HEADS, DIM, dtype=hidden.dtype, device=DEVICE)
            qkv = hidden @ project
            layer._attend(qkv, self.positions, self.slots, self.slots, metadata, out)
            hidden = hidden + out.view(tokens, -1) @ output
        return hidden

    def dummy(self, requests: int) -> None:
        """What vLLM captures with: block 0, no slot, lengths of the step's rows alone."""
        self.table.zero_(), self.slots.fill_(-1), self.positions.zero_(), self.lens.zero_()
        self.lens[:requests] = self.rows
        self.starts.copy_((torch.arange(REQUESTS + 1) * self.rows).clamp(max=requests * self.rows))

    def fill(self, lens: list[int], step: int) -> None:
        """A step's requests; behind them lengths of 0, slots of -1, positions that are left."""
        self.dummy(0)
        order = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(7)).int() + 1
        used, live = 0, len(lens) * self.rows
        for i, n in enumerate(lens):
            blocks = -(-n // BLOCK)
            self.table[i, :blocks] = order[used : used + blocks].to(DEVICE)
            used += blocks
            at = torch.arange(n - self.rows, n, device=DEVICE)
            rows = slice(i * self.rows, (i + 1) * self.rows)
            self.positions[rows], self.lens[i] = at, n
            self.slots[rows] = self.table[i].long()[at // BLOCK] * BLOCK + at % BLOCK
        self.positions[live:] = 77
        starts = (torch.arange(REQUESTS + 1) * self.rows).clamp(max=live)
        self.starts.copy_(starts)
        generator = torch.Generator().manual_seed(step)
        self.hidden.copy_(torch.randn(self.hidden.shape, generator=generator))

    def caches(self) -> list[torch.Tensor]:
        both = ((x.cache.pages, x.index_cache.cache.pages) for x in self.layers)
        return [pages for pair in both for pages in pair]


@pytest.fixture(autouse=True, scope="module")
def stubs():
    vllm_stubs.install()


BATCHES = {8: [[20_000, 300, 4, 129, 2048, 2049, 15_000, 7]], 4: [[128, 2050, 6], [31_000] * 2]}
"""Requests of a graph -> lengths of the steps that it replays."""


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", ["nvfp4", "fp8"])
def test_replays_are_the_steps_without_a_graph(dtype, rows):
    steps, graphs = Steps(dtype, rows), {}
    before = [pages.clone() for pages in steps.caches()]
    for requests in BATCHES:
        steps.dummy(requests)
        steps.run(steps.metadata(requests, MODEL_LEN, capture=True))  # compiles
        metadata = steps.metadata(requests, MODEL_LEN, capture=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = steps.run(metadata)
        graphs[requests] = graph, out
    for pages, old in zip(steps.caches(), before, strict=True):
        assert torch.equal(pages, old)  # a dummy batch writes nothing
    for number in range(3):
        for requests, batches in BATCHES.items():
            for lens in batches:
                check(steps, graphs[requests], requests, [n + number * rows for n in lens], number)


def check(steps: Steps, captured: tuple, requests: int, lens: list[int], number: int) -> None:
    graph, out = captured
    steps.fill(lens, number)
    live, before = len(lens) * steps.rows, [pages.clone() for pages in steps.caches()]
    eager = steps.run(steps.metadata(requests, max(lens))).clone()
    wanted = [pages.clone() for pages in steps.caches()]
    assert not all(torch.equal(a, b) for a, b in zip(wanted, before, strict=True))
    for pages, old in zip(steps.caches(), before, strict=True):
        pages.copy_(old)
    out.fill_(float("nan"))
    steps.metadata(requests, max(lens))
    graph.replay()
    assert torch.isfinite(out[:live]).all()
    assert torch.equal(out[:live], eager[:live])
    for pages, written in zip(steps.caches(), wanted, strict=True):
        assert torch.equal(pages, written)


def test_an_upload_in_a_capture_is_refused_by_name():
    device = torch.zeros(1, device=DEVICE).device
    flydsl_host.lut_table.cache_clear()
    assert not launcher.capturing(device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=DEVICE)
        assert launcher.capturing(device)
        with pytest.raises(RuntimeError, match=r"NVFP4 table of fold 0 .* before the capture"):
            flydsl_host.lut_table(0, device)
    assert flydsl_host.lut_table(0, device).shape == (256, 8)
    assert dispatch.on_host(torch.zeros(1, device=DEVICE)) == (DEVICE == "cpu")

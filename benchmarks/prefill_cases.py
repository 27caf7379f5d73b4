"""Prefill work for bench_msa_triton.py: scores, sparse and dense attention at TP4 shapes.

A chunk of 16,384 tokens whose context ends at 131,072, 16 query heads, 1 KV head, 16 blocks of 128.
Two kinds of selection, both with the newest block:

    random       15 of the causal blocks, each token on its own: no two tokens agree
    correlated   a slot keeps its block for 64 tokens on average
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks import cases, peers, roofline
from rocm_msa import ops

SCALE = 128**-0.5
TOKENS, CONTEXT, BLOCKS, POOL = 16384, 131072, 1024, 1100
KINDS = ("nvfp4", "fp8", "bf16")
PAGE_BYTES, INDEX_PAGE_BYTES = 18432, 9216  # NVFP4
DENSE_DECODE = ((1, 1, 131072), (32, 1, 8192), (128, 1, 8192), (1, 4, 524288))

Case = tuple[str, str, float, dict[str, Callable[[], list]]]


class Chunk:
    """Queries, tables and selections of the chunk."""

    def __init__(self) -> None:
        self.table = torch.randperm(POOL, device="cuda").int()[:BLOCKS].view(1, BLOCKS)
        self.index_q = torch.randn(TOKENS, 1, 128, device="cuda").bfloat16()
        self.q = torch.randn(TOKENS, 16, 128, device="cuda").bfloat16()
        self.cu = torch.tensor([0, TOKENS], dtype=torch.int32, device="cuda")
        self.lens = torch.tensor([CONTEXT], dtype=torch.int32, device="cuda")
        n = torch.arange(TOKENS, device="cuda") + CONTEXT - TOKENS + 1
        self.blocks = ((n + 127) // 128).int()
        self.scores = torch.empty(1, TOKENS, BLOCKS, device="cuda")
        self.out = torch.empty_like(self.q)

    def selection(self, name: str) -> torch.Tensor:
        """int32 `[1, TOKENS, 16]`."""
        newest = (self.blocks - 1)[:, None]
        if name == "random":
            at = torch.arange(BLOCKS, device="cuda")[None]
            draw = torch.rand(TOKENS, BLOCKS, device="cuda").masked_fill_(at >= newest, -1)
            others = draw.topk(15, dim=1).indices.int()
        else:
            run = (torch.rand(TOKENS, 15, device="cuda") < 1 / 64).long().cumsum(0)
            first_chunk_block = (CONTEXT - TOKENS) // 128
            draw = torch.randint(first_chunk_block // 16, (int(run.max()) + 1, 15), device="cuda")
            others = (draw.gather(0, run) * 16 + torch.arange(15, device="cuda")).int()
        return torch.cat([others, newest], 1)[None].contiguous()


def prefill() -> Iterator[Case]:
    chunk = Chunk()
    yield from _sparse(chunk)
    yield from _scores(chunk)
    select = lambda: ops.block_topk(chunk.scores, chunk.blocks, backend="triton")  # noqa: E731
    floor = roofline.floor_us(chunk.scores.numel() * 4)
    yield "block_topk", "16K rows of 1K", floor, {"ours": lambda: [select]}


def _sparse(c: Chunk) -> Iterator[Case]:
    vllm = peers.load("sparse_attn")
    floor = roofline.floor_us(BLOCKS * PAGE_BYTES + 2 * c.q.numel() * 2)
    mains = {d: cases.main_cache(POOL, d) for d in KINDS}
    for name in ("random", "correlated"):
        ids, table = c.selection(name), {}
        for d, main in mains.items():
            arguments = (c.q, main, ids, c.table, c.cu, c.lens, SCALE)
            table[f"ours {d}"] = lambda a=arguments: [
                lambda: ops.sparse_prefill(*a, out=c.out, backend="triton")
            ]
        for d, dtype in (("fp8", torch.float8_e4m3fn), ("bf16", torch.bfloat16)) if vllm else ():
            kv = torch.randn(POOL, 1, 128, 256, device="cuda").to(dtype)
            rest = (ids, c.table, c.cu, c.lens, c.lens - TOKENS, TOKENS, 1, SCALE, c.out)
            table[f"vLLM {d}"] = lambda kv=kv, rest=rest: [
                lambda: vllm.minimax_m3_sparse_attn(c.q, kv, *rest)
            ]
        yield "sparse_prefill", f"16K of 128K {name}", floor, table


def _scores(c: Chunk) -> Iterator[Case]:
    vllm, table = peers.load("index_topk"), {}
    for d in KINDS:
        arguments = (c.index_q, cases.index_cache(POOL, d), c.table, c.cu, c.lens)
        table[f"ours {d}"] = lambda a=arguments: [
            lambda: ops.index_score_prefill(*a, out=c.scores, backend="triton")
        ]
    for d, dtype in (("fp8", torch.float8_e4m3fn), ("bf16", torch.bfloat16)) if vllm else ():
        ik = torch.randn(POOL, 128, 128, device="cuda").to(dtype)
        rest = (c.table, c.cu, c.lens, c.lens - TOKENS, TOKENS, CONTEXT, 1)
        table[f"vLLM {d}"] = lambda ik=ik, rest=rest: [
            lambda: vllm.minimax_m3_index_score(c.index_q, ik, *rest)
        ]
    floor = roofline.floor_us(BLOCKS * INDEX_PAGE_BYTES, c.scores.numel() * 4)
    yield "score_prefill", "16K of 128K", floor, table


def dense() -> Iterator[Case]:
    """The dense layers' op; PyTorch's flash attention over contiguous bf16 K and V beside it."""
    c, table = Chunk(), {}
    for d in KINDS:
        arguments = (c.q, cases.main_cache(POOL, d), c.table, c.cu, c.lens, SCALE)
        table[f"ours {d}"] = lambda a=arguments: [
            lambda: ops.dense_attention(*a, out=c.out, backend="triton")
        ]
    table["torch flash bf16"] = lambda: [_flash(c.q[None].transpose(1, 2), CONTEXT)]
    floor = roofline.floor_us(BLOCKS * PAGE_BYTES + 2 * c.q.numel() * 2)
    yield "dense prefill", "16K of 128K", floor, table
    for requests, rows, context in DENSE_DECODE:
        blocks = context // 128
        pages = min(requests * blocks, 16384)
        tables = (torch.arange(requests * blocks, device="cuda") % pages).int()
        q = torch.randn(requests * rows, 16, 128, device="cuda").bfloat16()
        cu = (torch.arange(requests + 1, device="cuda") * rows).int()
        lens = torch.full((requests,), context, dtype=torch.int32, device="cuda")
        main, out = cases.main_cache(pages, "nvfp4"), torch.empty_like(q)
        arguments = (q, main, tables.view(requests, blocks), cu, lens, SCALE)
        table = {
            "ours nvfp4": lambda a=arguments, out=out: [
                lambda: ops.dense_attention(*a, out=out, backend="triton")
            ]
        }
        if rows == 1:
            by_request = q.view(requests, 1, 16, 128).transpose(1, 2)
            table["torch flash bf16"] = lambda q=by_request, n=context: [_flash(q, n)]
        floor = roofline.floor_us(requests * blocks * PAGE_BYTES)
        yield "dense decode", f"{requests}x{rows} {context // 1024}K", floor, table


def _flash(q: torch.Tensor, context: int) -> Callable[[], torch.Tensor]:
    """Flash attention of `q [requests, heads, rows, 128]`, the last rows of their contexts."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    k, v = torch.randn(2, q.shape[0], 1, context, 128, device="cuda").bfloat16()
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    rows = q.shape[2]
    mask = causal_lower_right(rows, context) if rows > 1 else None

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=SCALE
            )

    return call

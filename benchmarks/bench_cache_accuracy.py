"""What the cache format costs in accuracy: block selection and attention output, no GPU needed.

    python benchmarks/bench_cache_accuracy.py [--blocks 512] [--rows 64] [--out DIR]

Synthetic vectors with what real ones have: heavy tails (Student t, 4 degrees of freedom), keys
near one of 64 topics and queries near one of them, RMS norm of queries and keys as in the model,
channels of other sizes (log-normal, three of K 4 times larger), values of tokens of other sizes.
All in fp32 but the cache: bf16, FP8 (E4M3, scale from the largest magnitude), NVFP4 as the format
says, and NVFP4 as the gfx950 kernels see it, rounded to E4M3 by the table (nvfp4_lut.py).

    selection   index scores -> 16 of `blocks` blocks, against those of the unrounded keys
    attention   |out - out of unrounded K and V| / |out|, over the blocks that unrounded keys select
    lut alone   the same two with "nvfp4" in the place of the unrounded keys
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.formats import fp8, nvfp4, nvfp4_lut
from rocm_msa.ops import block_topk

DIM, TOPK, GROUP, TOPICS = 128, 16, 16, 64


def heavy(g: torch.Generator, *shape: int) -> torch.Tensor:
    """Student t with 4 degrees of freedom, unit variance."""
    chi = sum(torch.randn(*shape, generator=g).square() for _ in range(4)) / 4
    return torch.randn(*shape, generator=g) / chi.sqrt() / math.sqrt(2)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def vectors(g: torch.Generator, tokens: int, topics: torch.Tensor, pull: float) -> torch.Tensor:
    """[tokens, 128]: consecutive 64 tokens share a topic, RMS 1."""
    topic = torch.randint(len(topics), (-(-tokens // 64),), generator=g).repeat_interleave(64)
    x = pull * topics[topic[:tokens]] + heavy(g, tokens, DIM)
    return normed(x)


def channel_sizes(g: torch.Generator) -> torch.Tensor:
    size = torch.exp(0.3 * torch.randn(DIM, generator=g))
    size[torch.randperm(DIM, generator=g)[:3]] *= 4
    return size


def formats(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """x [tokens, 128] fp32 through each cache format, fp32."""
    largest = x.abs().max().item()
    scale = largest / fp8.MAX
    data, scales = nvfp4.quantize(x, largest / (fp8.MAX * 6))
    fold, g = nvfp4_lut.RECOMMENDED_FOLD_EXPONENT, largest / (fp8.MAX * 6)
    rounded = nvfp4_lut.dequantize_via_lut(data, scales, fold).float()
    return {
        "bf16": x.bfloat16().float(),
        "fp8": (x / scale).to(torch.float8_e4m3fn).float() * scale,
        "nvfp4": nvfp4.dequantize(data, scales, g),
        "nvfp4, table": rounded * (g * 2.0**-fold),
    }


def select(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """int32 [rows, 16] of q [rows, 128] and k [tokens, 128]."""
    scores = (q @ k.T).view(len(q), -1, BLOCK_TOKENS).amax(-1)
    count = torch.full((len(q),), scores.shape[1], dtype=torch.int32)
    return block_topk(scores[None], count)[0]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[rows, 16 heads, 128]."""
    keys, values = (x.view(-1, BLOCK_TOKENS, DIM)[ids.long()].flatten(1, 2) for x in (k, v))
    p = torch.softmax(q @ keys.transpose(1, 2) / math.sqrt(DIM), -1)
    return p @ values


def measure(blocks: int, rows: int, seed: int) -> dict[str, dict[str, float]]:
    g = torch.Generator().manual_seed(seed)
    tokens, topics = blocks * BLOCK_TOKENS, torch.randn(TOPICS, DIM, generator=g)
    index_size, size = channel_sizes(g), channel_sizes(g)
    index_k = vectors(g, tokens, topics, 0.7) * index_size
    k, v = vectors(g, tokens, topics, 0.7) * size, heavy(g, tokens, DIM) * channel_sizes(g)
    v *= torch.exp(0.3 * torch.randn(tokens, 1, generator=g))
    wanted = torch.randint(TOPICS, (rows,), generator=g)
    index_q = normed(topics[wanted] + heavy(g, rows, DIM))
    q = normed(topics[wanted][:, None] + heavy(g, rows, GROUP, DIM))
    true_ids = select(index_q, index_k)
    true_out = attend(q, k, v, true_ids)
    names = formats(index_k[:BLOCK_TOKENS])
    index_by, k_by, v_by = formats(index_k), formats(k), formats(v)
    ids = {name: select(index_q, index_by[name]) for name in names}
    out = {name: attend(q, k_by[name], v_by[name], true_ids) for name in names}
    found = {name: compare(ids[name], true_ids, out[name], true_out) for name in names}
    found["table against nvfp4"] = compare(
        ids["nvfp4, table"], ids["nvfp4"], out["nvfp4, table"], out["nvfp4"]
    )
    return found


def compare(ids, true_ids, out, true_out) -> dict[str, float]:
    same = (ids[:, :, None] == true_ids[:, None, :]).any(-1).sum(-1)
    error = (out - true_out).norm(dim=-1) / true_out.norm(dim=-1)
    cosine = torch.nn.functional.cosine_similarity(out, true_out, dim=-1)
    return {
        "same selections": (same == TOPK).float().mean().item(),
        "blocks in common": same.float().mean().item(),
        "attention error, mean": error.mean().item(),
        "attention error, 99 %": error.flatten().quantile(0.99).item(),
        "cosine, least": cosine.min().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = [measure(options.blocks, options.rows, seed) for seed in range(options.seeds)]
    mean = {
        name: {key: sum(r[name][key] for r in runs) / len(runs) for key in runs[0][name]}
        for name in runs[0]
    }
    title = f"{options.blocks} blocks, {options.rows} rows, {options.seeds} seeds"
    table = Table(title=f"{title}; torch {torch.__version__}, {platform.machine()}")
    table.add_column("cache")
    for key in next(iter(mean.values())):
        table.add_column(key, justify="right")
    for name, values in mean.items():
        table.add_row(name, *(f"{value:.4g}" for value in values.values()))
    Console(width=140).print(table)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "cache_accuracy.json"
        path.write_text(
            json.dumps({"options": vars(options) | {"out": ""}, "mean": mean}, indent=1)
        )


if __name__ == "__main__":
    main()

"""Brute-force oracle of the ops: plain loops over rows, heads and keys in fp64.

Written from the contract, knowing nothing of the references: no tiles, no batched products. Keys
and values are what the caches give back for each token, read token by token through the page table.
"""

from __future__ import annotations

import math

import torch

BLOCK = 128


def row_lengths(lens: list[int], counts: list[int]) -> list[tuple[int, int]]:
    """(request, causal length) of each row; request r has `counts[r]` rows, its last positions."""
    rows = []
    for request, (length, count) in enumerate(zip(lens, counts, strict=True)):
        rows += [(request, max(0, length - count + i + 1)) for i in range(count)]
    return rows


def blocks(n: int) -> int:
    return -(-n // BLOCK)


def scores(index_q, keys, rows, max_blocks):
    """fp64 `[heads, rows, max_blocks]`; `keys[request]` fp64 `[len, dim]`."""
    heads = index_q.shape[1]
    out = torch.full((heads, len(rows), max_blocks), -math.inf, dtype=torch.float64)
    for t, (request, n) in enumerate(rows):
        for h in range(heads):
            for b in range(blocks(n)):
                k = keys[request][b * BLOCK : min(n, (b + 1) * BLOCK)]
                out[h, t, b] = (k @ index_q[t, h].double()).max()
    return out


def select(row: list[float], nb: int, topk: int = 16, init: int = 0, local: int = 1) -> list[int]:
    """Ids of one row, -1 padded: init blocks, newest blocks, then by rank."""
    kept = list(range(min(init, nb)))
    kept += [b for b in range(max(0, nb - local), nb) if b not in kept]

    def rank(b: int):
        nan = math.isnan(row[b])
        return (nan, 0.0 if nan else -row[b], b)

    rest = sorted((b for b in range(nb) if b not in kept), key=rank)
    ids = (kept + rest)[:topk]
    return ids + [-1] * (topk - len(ids))


def attention(q, keys, values, rows, block_ids, sm_scale):
    """fp64 out `[rows, q_heads, dim]` and lse `[rows, q_heads]`.

    keys, values: per request fp64 `[len, kv_heads, dim]`; block_ids `[kv_heads][row]` lists, or
    None for every causal block.
    """
    q_heads, kv_heads = q.shape[1], keys[0].shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for t, (request, n) in enumerate(rows):
        for h in range(q_heads):
            g = h // (q_heads // kv_heads)
            chosen = range(blocks(n)) if block_ids is None else block_ids[g][t]
            seen = [j for j in range(n) if j // BLOCK in set(chosen)]
            if not seen:
                continue
            s = sm_scale * (keys[request][seen, g] @ q[t, h].double())
            lse[t, h] = torch.logsumexp(s, 0)
            out[t, h] = torch.softmax(s, 0) @ values[request][seen, g]
    return out, lse


def norm_rope(x, weight, eps, cos, sin):
    """One head of one token, fp64 `[dim]`: Gemma RMSNorm, then partial NeoX RoPE."""
    x, half = x.double(), len(cos)
    y = x / math.sqrt(float((x * x).mean()) + eps) * (1 + weight.double())
    out = y.clone()
    for i in range(half):
        a, b, c, s = y[i], y[half + i], float(cos[i]), float(sin[i])
        out[i], out[half + i] = a * c - b * s, b * c + a * s
    return out

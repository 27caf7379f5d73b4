"""The layer in PyTorch on simulated ranks, with the kernel's roundings: a function a phase.

    regions = layer(ranks, batch, caches, hidden, residual)       a dict of regions a rank

Sums over ranks are added in rank order. What differs from the kernel is the order of fp32 sums
within a phase and the last bits of rsqrt, exp2 and rcp. Layouts of regions: plan.scratch_layout,
with the rows of the batch alone.
"""

from __future__ import annotations

import torch

from mono_kernel.batch import Batch
from mono_kernel.shapes import HEAD_DIM, Shape
from mono_kernel.weights import LayerWeights, Stored
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.paged import IndexCache, MainCache
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.formats import nvfp4_lut
from rocm_msa.ops import Heads, Norms, block_topk, qkv_insert
from rocm_msa.ops.flydsl_host import table_fold
from rocm_msa.ops.qkv_insert.reference import gemma_norm
from rocm_msa.ops.reference_scores import block_scores
from rocm_msa.ops.rows import Rows, prefill_rows
from rocm_msa.ops.sparse_decode import reference_fp8

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
STEP = 4  # bits between the terms
_TOP, _BIAS, _MANTISSA = 7, 127, 23

Caches = tuple[MainCache, IndexCache]
Regions = dict[str, torch.Tensor]


def layer(
    ranks: list[LayerWeights],
    batch: Batch,
    caches: list[Caches],
    hidden: torch.Tensor,
    residual: torch.Tensor,
) -> list[Regions]:
    """All regions by rank; the caches are written.

    Args:
        hidden, residual: bf16 [rows, hidden], the same on all ranks.
    """
    found = [
        attention(weights, batch, pair, hidden, residual)
        for weights, pair in zip(ranks, caches, strict=True)
    ]
    total = in_rank_order([output_part(w, r) for w, r in zip(ranks, found, strict=True)])
    found = [experts(w, r, total) for w, r in zip(ranks, found, strict=True)]
    total = in_rank_order([down_part(w, r) for w, r in zip(ranks, found, strict=True)])
    for r in found:
        r["hidden_out"] = total.to(BF16)
    return found


def attention(
    weights: LayerWeights,
    batch: Batch,
    caches: Caches,
    hidden: torch.Tensor,
    residual: torch.Tensor,
) -> Regions:
    """A rank's regions before the sum over ranks in `output`."""
    r: Regions = norm(weights, hidden, residual)
    r |= project(weights, r)
    r |= insert(weights, r, batch, caches)
    r |= score(r, batch, caches[1])
    r |= attend(weights.shape, r, batch, caches[0])
    return r | join(weights, r)


def experts(weights: LayerWeights, r: Regions, total: torch.Tensor) -> Regions:
    """A rank's regions before the sum over ranks in `down`. total: fp32, of all `output_part`."""
    r = r | {"residual_out": add(r["stream"], total)}
    r |= route(weights, r)
    return r | up(weights, r)


def in_rank_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """((p0 + p1) + p2) + ... in fp32."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def add(stream: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """bf16(stream + bf16(total)): a linear's output, then the residual."""
    return (stream.float() + total.to(BF16).float()).to(BF16)


# Operands


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [rows, n] -> terms E4M3 [rows, 2, n] and the factor fp32 [rows] that undoes 2^-p.

    x 2^-p = t0 + t1 / 16, p such that the row's largest magnitude lies in [128, 256).
    """
    x = x.float()
    exponent = (x.abs().amax(-1).view(torch.int32) >> _MANTISSA) - _BIAS - _TOP
    power = exponent.clamp(-126, 126)
    up_, down_ = (((_BIAS + s * power) << _MANTISSA).view(torch.float32) for s in (-1, 1))
    return terms_of(x * up_[:, None]), down_


def terms_of(scaled: torch.Tensor) -> torch.Tensor:
    """fp32 [..., n], |x| < 256 -> E4M3 [..., 2, n]."""
    high = scaled.to(E4M3)
    low = ((scaled - high.float()) * 2.0**STEP).to(E4M3)
    return torch.stack([high, low], -2)


def value(terms: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 values of E4M3 terms [..., 2, n]; `factor` [...]."""
    high, low = terms.float().unbind(-2)
    x = high + low * 2.0**-STEP
    return x if factor is None else x * factor[..., None]


def operand(weights: LayerWeights, x: torch.Tensor, name: str) -> Regions:
    """Regions `name` and `name`_factor of bf16 rows, for the attention's linears."""
    if weights.shape.attention_format == "bf16":
        return {name: x, f"{name}_factor": torch.ones(x.shape[0])}
    terms, factor = split(x)
    return {name: terms, f"{name}_factor": factor}


def read_operand(r: Regions, name: str) -> torch.Tensor:
    x = r[name]
    return x.float() if x.dtype is BF16 else value(x, r[f"{name}_factor"])


def product(x: torch.Tensor, weight: Stored) -> torch.Tensor:
    """fp32 [rows, N], in double and rounded once."""
    return (x.double() @ weight.dense().double().T).float()


# Phases


def rows_of(batch: Batch) -> Rows:
    """Request and keys of each row."""
    return prefill_rows(batch.starts, batch.seq_lens, batch.rows)


def norm(weights: LayerWeights, hidden: torch.Tensor, residual: torch.Tensor) -> Regions:
    stream = (hidden.float() + residual.float()).to(BF16)
    x = gemma_norm(stream, weights.vectors["input_norm"], weights.shape.eps).to(BF16)
    return {"stream": stream, **operand(weights, x, "normed")}


def project(weights: LayerWeights, r: Regions) -> Regions:
    return {"projected": product(read_operand(r, "normed"), weights.qkv).to(BF16)}


def insert(weights: LayerWeights, r: Regions, batch: Batch, caches: Caches) -> Regions:
    s, v = weights.shape, weights.vectors
    heads = Heads(s.q_heads, s.kv_heads, s.index_heads, HEAD_DIM, s.rotary_dim)
    norms = Norms(v["q_norm"], v["k_norm"], v["index_q_norm"], v["index_k_norm"], s.eps)
    q, index_q = qkv_insert(
        r["projected"], norms, batch.cos_sin, batch.positions, *caches,
        batch.main_slots, batch.index_slots, heads, backend="reference",
    )  # fmt: skip
    return {"q": q, "index_q": index_q}


def score(r: Regions, batch: Batch, index_cache: IndexCache) -> Regions:
    """Keys as the table gives them, queries exact."""
    keys = _table_keys(index_cache)
    return {"scores": block_scores(r["index_q"], keys, batch.block_table, rows_of(batch))}


def attend(s: Shape, r: Regions, batch: Batch, main_cache: MainCache) -> Regions:
    """`selected`, and `attention` bf16 [rows, q_heads, 128]: the slots' partial results folded."""
    rows = rows_of(batch)
    count = rows.num_blocks.to(torch.int32)
    selected = block_topk(
        r["scores"], count, s.topk, s.init_blocks, s.local_blocks, backend="reference"
    )
    out, _ = reference_fp8.run_rows(
        r["q"], main_cache, selected, batch.block_table, rows, HEAD_DIM**-0.5
    )
    return {"selected": selected, "attention": out.to(BF16)}


def join(weights: LayerWeights, r: Regions) -> Regions:
    return operand(weights, r["attention"].flatten(1), "attended")


def output_part(weights: LayerWeights, r: Regions) -> torch.Tensor:
    """This rank's fp32 [rows, hidden] of the output projection."""
    return product(read_operand(r, "attended"), weights.output)


def route(weights: LayerWeights, r: Regions) -> Regions:
    """post: operands of the norm; logits: fp32 [rows, experts]."""
    x = gemma_norm(r["residual_out"], weights.vectors["post_norm"], weights.shape.eps).to(BF16)
    terms, factor = split(x)
    logits = (x.double() @ weights.vectors["router"].double().T).float()
    return {"post": terms, "post_factor": factor, "logits": logits}


def choose(s: Shape, logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts int32 [rows, chosen], best first, ties to the lower id; their weights fp32)."""
    scores = logits.sigmoid()
    order = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, : s.chosen]
    picked = scores.gather(-1, order)
    weights = picked / picked.sum(-1, keepdim=True) * s.routed_scale
    return order.to(torch.int32), weights


def up(weights: LayerWeights, r: Regions) -> Regions:
    """active: E4M3 [rows, slots, 2, widest] of x 2^active_exponent; a narrower expert's rest 0."""
    s = weights.shape
    chosen, chosen_weights = choose(s, r["logits"], weights.vectors["bias"])
    x = value(r["post"], r["post_factor"])
    active = torch.zeros(x.shape[0], s.slots, 2, s.widest).to(E4M3)
    for rows, slots, (gate, up_, _), _ in experts_of(weights, chosen, chosen_weights):
        terms = swiglu(s, product(x[rows], gate), product(x[rows], up_))
        active[rows, slots, :, : gate.outputs] = terms
    return {"active": active, "chosen": chosen, "chosen_weights": chosen_weights}


def experts_of(weights: LayerWeights, chosen: torch.Tensor, shares: torch.Tensor):
    """(rows, their slots, the expert's linears, fp32 [rows, 1] shares) of each expert in use, by
    rising id, the shared one last."""
    s, everyone = weights.shape, torch.arange(chosen.shape[0])
    for expert in chosen.unique().tolist():
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        yield rows, slots, weights.experts[expert], shares[rows, slots, None]
    if weights.shared:
        yield everyone, torch.full_like(everyone, s.chosen), weights.shared, torch.ones(1, 1)


def swiglu(s: Shape, gate: torch.Tensor, up_: torch.Tensor) -> torch.Tensor:
    """Terms of bf16(gate sigmoid(alpha gate) (up + beta)), clamped before."""
    gate, up_ = gate.clamp(max=s.limit), up_.clamp(-s.limit, s.limit)
    active = gate * torch.sigmoid(s.alpha * gate) * (up_ + s.beta)
    return terms_of(active.to(BF16).float() * 2.0**s.active_exponent)


def down_part(weights: LayerWeights, r: Regions) -> torch.Tensor:
    """This rank's fp32 [rows, hidden]: the experts of a row by rising id, the shared one last."""
    s = weights.shape
    undo = 2.0**-s.active_exponent
    total = torch.zeros(r["active"].shape[0], s.hidden)
    for rows, slots, (_, _, down), share in experts_of(weights, r["chosen"], r["chosen_weights"]):
        x = value(r["active"][rows, slots]) * undo
        total[rows] += product(x[:, : down.inputs], down) * share
    return total


def _table_keys(cache: IndexCache) -> IndexCache:
    """An FP8 cache with the bytes that the table makes of an NVFP4 one."""
    data, scales = cache.region("k_data"), cache.region("k_scales")
    fold = table_fold(cache.scales["k"])
    values = nvfp4_lut.dequantize_via_lut(data, scales, fold).view(torch.uint8)
    pages = values.reshape(cache.num_blocks, BLOCK_TOKENS * HEAD_DIM)
    scale = cache.scales["k"] * 2.0**-fold
    return IndexCache.from_tensor(pages, CacheDType.FP8, head_dim=HEAD_DIM, k_scale=scale)

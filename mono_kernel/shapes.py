"""What one tensor-parallel rank holds of a layer, and how its weights are stored.

Sizes in elements. Every size comes from the model's config; what the kernel cannot serve is refused
with all reasons at once. Pure Python: no torch, no flydsl.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields, replace

from rocm_msa.config import ModelConfig
from rocm_msa.errors import ConfigError, Refusals, expect

MAX_ROWS = 16  # requests x rows of a request: columns of a matrix tile
TILE = 16  # output features of a matrix tile
CHUNK = 128  # values along k of a matrix instruction on E4M3
HEAD_DIM = 128
GROUP = 16  # query heads of a KV head, at most: columns of the attention's products
RANKS = (1, 2, 4, 8)
ATTENTION_FORMATS = ("mxfp8", "bf16")
EXPERT_FORMATS = ("mxfp4", "nvfp4", "mxfp8")
MAX_EXPERTS = 256  # the router's workgroup looks at one expert a lane
MAX_CHOSEN = 8
_TOPK = 16
_TILES = 4  # of 16 (row, index head) pairs that a wave scores at once


@dataclass(frozen=True)
class Formats:
    """How the checkpoint stores the weights. attention: of QKV, index and output projection.
    routed, shared: of the experts."""

    attention: str = "mxfp8"
    routed: str = "mxfp4"
    shared: str = "mxfp4"


@dataclass(frozen=True)
class Shape:
    """One rank's share of a layer. `shared`: width of the shared expert, 0 without one. `exchange`:
    the ranks share the index scan, each scores its part of the blocks for all index heads."""

    tp: int
    hidden: int
    q_heads: int
    kv_heads: int
    index_heads: int
    kv_replicas: int  # ranks that hold the same KV and index heads
    rotary_dim: int
    experts: int
    chosen: int  # experts a token
    intermediate: int
    shared: int
    topk: int  # blocks a row attends to
    init_blocks: int
    local_blocks: int
    attention_format: str
    routed_format: str
    shared_format: str
    eps: float
    routed_scale: float
    alpha: float
    beta: float
    limit: float
    exchange: bool = False

    def __post_init__(self) -> None:
        refusals = Refusals("the mono kernel cannot serve this layer")

        def check(ok: bool, name: str, wanted: object) -> None:
            refusals.check(ok, expect(name, wanted, getattr(self, name)))

        def multiple(name: str, of: int, at_least: int = 1) -> None:
            size = getattr(self, name)
            check(size % of == 0 and size >= at_least, name, f"a multiple of {of}, >= {at_least}")

        check(self.tp in RANKS, "tp", f"one of {RANKS}")
        multiple("hidden", CHUNK)
        multiple("intermediate", CHUNK)
        multiple("shared", CHUNK, at_least=0)
        check(self.kv_heads >= 1, "kv_heads", ">= 1")
        alone = self.kv_replicas == 1 or self.kv_heads == 1
        whole = self.kv_replicas >= 1 and self.tp % self.kv_replicas == 0
        check(alone and whole, "kv_replicas", "a divisor of tp, 1 unless kv_heads is")
        group = self.q_heads / max(self.kv_heads, 1)
        check(group in range(1, GROUP + 1), "q_heads", f"kv_heads x 1..{GROUP}")
        check(self.index_heads == self.kv_heads, "index_heads", f"kv_heads ({self.kv_heads})")
        check(self.rotary_dim in (16, 32, 64, 128), "rotary_dim", "one of (16, 32, 64, 128)")
        check(1 <= self.experts <= MAX_EXPERTS, "experts", f"1..{MAX_EXPERTS}")
        check(1 <= self.chosen <= min(MAX_CHOSEN, self.experts), "chosen", f"1..{MAX_CHOSEN}")
        check(self.topk == _TOPK, "topk", _TOPK)
        check(1 <= self.local_blocks <= self.topk, "local_blocks", f"1..{self.topk}")
        left = self.topk - self.local_blocks
        check(0 <= self.init_blocks <= left, "init_blocks", f"0..{left}")
        check(
            self.attention_format in ATTENTION_FORMATS,
            "attention_format",
            f"one of {ATTENTION_FORMATS}",
        )
        for name in ("routed_format", "shared_format"):
            check(getattr(self, name) in EXPERT_FORMATS, name, f"one of {EXPERT_FORMATS}")
        if self.exchange and whole:
            refusals.check(self.tp > 1, expect("tp with exchange", "> 1", self.tp))
            check(self.scored_heads <= _TILES, "scored_heads", f"<= {_TILES}, of all ranks")
        check(self.limit > 0 and self.largest_active < 256, "limit", "> 0, its SwiGLU below 256")
        refusals.raise_if_any()

    @classmethod
    def of(cls, model: ModelConfig, tp: int, formats: Formats = Formats()) -> Shape:
        """A rank's share. Raises ConfigError with the reasons against it."""
        rank = model.shard(tp)
        refusals = Refusals(f"the mono kernel cannot serve this model on {tp} ranks")
        for name, got, wanted in (
            ("head_dim", model.head_dim, HEAD_DIM),
            ("sparse_index_dim", model.index_dim, HEAD_DIM),
        ):
            refusals.check(got == wanted, expect(name, wanted, got))
        refusals.raise_if_any()
        return cls(
            tp=tp,
            hidden=model.hidden_size,
            q_heads=rank.q_heads,
            kv_heads=rank.kv_heads,
            index_heads=rank.index_heads,
            kv_replicas=rank.kv_replicas,
            rotary_dim=model.rope.rotary_dim,
            experts=model.num_experts,
            chosen=model.experts_per_token,
            intermediate=model.intermediate_size // tp,
            shared=model.shared_experts * model.intermediate_size // tp,
            topk=model.topk_blocks,
            init_blocks=model.init_blocks,
            local_blocks=model.local_blocks,
            attention_format=formats.attention,
            routed_format=formats.routed,
            shared_format=formats.shared,
            eps=model.rms_norm_eps,
            routed_scale=model.routed_scaling_factor,
            alpha=model.swiglu_alpha,
            beta=model.swiglu_beta,
            limit=model.swiglu_limit,
        )

    def sharing(self) -> Shape | None:
        """The same layer with `exchange`; None where the ranks cannot share the index scan."""
        try:
            return replace(self, exchange=True)
        except ConfigError:
            return None

    @property
    def heads(self) -> int:
        """Of the fused projection: q, k, v, index q, index k."""
        return self.q_heads + 2 * self.kv_heads + self.index_heads + 1

    @property
    def features(self) -> int:
        """Outputs of the fused projection."""
        return self.heads * HEAD_DIM

    @property
    def attended(self) -> int:
        """Inputs of the output projection."""
        return self.q_heads * HEAD_DIM

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def whole_kv_heads(self) -> int:
        """KV heads of the model."""
        return self.kv_heads * self.tp // self.kv_replicas

    @property
    def scored_heads(self) -> int:
        """Index heads that this rank scores blocks for; with the exchange the model's."""
        return self.index_heads * (self.tp // self.kv_replicas if self.exchange else 1)

    @property
    def slots(self) -> int:
        """Experts that a row goes through, the shared one last."""
        return self.chosen + (1 if self.shared else 0)

    @property
    def widest(self) -> int:
        """Activations of an expert, the largest of both kinds."""
        return max(self.intermediate, self.shared)

    @property
    def largest_active(self) -> float:
        """A bound of |gate sigmoid(alpha gate) (up + beta)|."""
        return self.limit * (self.limit + abs(self.beta))

    @property
    def active_exponent(self) -> int:
        """x 2^n of an expert's activation x is below 256, and no larger n does that."""
        return 7 - math.floor(math.log2(self.largest_active))

    @property
    def name(self) -> str:
        """A C identifier that stands for all fields."""
        text = repr([(f.name, getattr(self, f.name)) for f in fields(self)])
        mark = hashlib.sha256(text.encode()).hexdigest()[:8]
        formats = f"{self.attention_format}_{self.routed_format}_{self.shared_format}"
        return f"tp{self.tp}_h{self.hidden}_q{self.q_heads}_e{self.experts}_{formats}_{mark}"


def kv_head_of(rank: int, tp: int, kv_heads: int) -> range:
    """KV heads (of the whole model's `kv_heads`) that a rank holds; past their number, replicas."""
    if tp <= kv_heads:
        each = kv_heads // tp
        return range(rank * each, (rank + 1) * each)
    return range(rank * kv_heads // tp, rank * kv_heads // tp + 1)

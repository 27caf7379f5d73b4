"""qkv_insert on gfx950: one launch; traced code in flydsl_kernel.py.

A lane owns 8 neighbouring values of a head, a wave the same head of several tokens, a workgroup
four heads of these tokens. The encoding of a value is the reference's, bit for bit; the sum of
squares has another order and rsqrt is the hardware's, so that a norm may differ in its last bit.
Slots outside of the cache are ignored, a position outside of the table is its nearest end.

Refused: head_dim other than 32, 64, 128; a rotary_dim that is not 16, 32, 64 or 128; rows of qkv
and of cos_sin that do not start at multiples of 16 bytes; norm weights of several dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rocm_msa import launcher
from rocm_msa.arch import GFX950
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.pages import index_page, main_page
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.errors import check_int, expect
from rocm_msa.layout import Layout

LANE_VALUES = 8
WAVES = 4
ALIGN = 16  # bytes; of what a lane loads at once
_HEAD_DIMS, _ROTARY_DIMS = (32, 64, 128), (16, 32, 64, 128)
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_NONE = "none"


@dataclass(frozen=True)
class Build:
    """q, kv, index: heads; with index 0 index_dtype is "none". main_dtype, index_dtype: of the
    caches. dtype: of qkv, q and index_q. weight_dtype: of the norms. rope_dtype: of cos_sin."""

    q: int
    kv: int
    index: int
    head_dim: int
    rotary_dim: int
    main_dtype: str
    index_dtype: str
    dtype: str
    weight_dtype: str
    rope_dtype: str

    def __post_init__(self) -> None:
        for name, low in (("q", 1), ("kv", 1), ("index", 0)):
            check_int(name, getattr(self, name), low)
        if self.head_dim not in _HEAD_DIMS:
            raise NotImplementedError(
                expect("head_dim on flydsl", f"one of {_HEAD_DIMS}", self.head_dim)
            )
        if self.rotary_dim not in _ROTARY_DIMS or self.rotary_dim > self.head_dim:
            wanted = f"one of {_ROTARY_DIMS}, <= head_dim"
            raise NotImplementedError(expect("rotary_dim on flydsl", wanted, self.rotary_dim))
        CacheDType(self.main_dtype)
        if self.index:
            CacheDType(self.index_dtype)
        elif self.index_dtype != _NONE:
            raise ValueError(expect("index_dtype", repr(_NONE), repr(self.index_dtype)))
        for name in ("dtype", "weight_dtype", "rope_dtype"):
            if getattr(self, name) not in _NAMES.values():
                wanted = f"one of {tuple(_NAMES.values())}"
                raise ValueError(expect(name, wanted, getattr(self, name)))

    @property
    def symbol(self) -> str:
        return (
            f"qkv_insert_q{self.q}_kv{self.kv}_i{self.index}_d{self.head_dim}_r{self.rotary_dim}"
            f"_{self.main_dtype}_{self.index_dtype}_{self.dtype}_{self.weight_dtype}"
            f"_{self.rope_dtype}"
        )

    @property
    def grid(self) -> str:
        return f"(tokens / {self.wave_tokens}, heads / {WAVES})"

    @property
    def heads(self) -> int:
        """Of the fused projection."""
        return self.q + 2 * self.kv + (self.index + 1 if self.index else 0)

    @property
    def head_lanes(self) -> int:
        return self.head_dim // LANE_VALUES

    @property
    def wave_tokens(self) -> int:
        return GFX950.wave_size // self.head_lanes

    @property
    def main_layout(self) -> Layout:
        return main_page(self.kv, self.head_dim, CacheDType(self.main_dtype)).head_layout

    @property
    def index_layout(self) -> Layout:
        return index_page(self.head_dim, CacheDType(self.index_dtype)).head_layout


def builds(config) -> list[Build]:
    """Of the sparse layers and, where there are any, the dense ones; see aot.ServingConfig."""
    main, index = config.main_dtype.value, config.index_dtype.value
    kinds = [(config.index_heads, index)] + [(0, _NONE)] * config.has_dense_layers
    try:
        return [
            Build(
                config.q_heads, config.kv_heads, heads, config.head_dim, config.rotary_dim,
                main, name, config.dtype, config.dtype, config.rope_dtype,
            )
            for heads, name in kinds
        ]  # fmt: skip
    except NotImplementedError:
        return []


def needs(
    qkv, norms, cos_sin, positions, main_cache, index_cache, main_slots, index_slots, heads
) -> list[Build]:
    """The build for these arguments of qkv_insert; reads no values."""
    given = [norms.q, norms.k, *([norms.index_q, norms.index_k] if heads.index else [])]
    for name, tensor in (("qkv", qkv), ("cos_sin", cos_sin)):
        _check_rows(name, tensor)
    if len({w.dtype for w in given}) > 1:
        raise NotImplementedError(expect("norms.*.dtype on flydsl", "one dtype", "several"))
    if any(w.stride(0) != 1 or w.data_ptr() % ALIGN for w in given):
        wanted = f"contiguous, at multiples of {ALIGN} bytes"
        raise NotImplementedError(expect("norms on flydsl", wanted, "others"))
    return [
        Build(
            heads.q, heads.kv, heads.index, heads.head_dim, heads.rotary_dim,
            main_cache.dtype.value, index_cache.dtype.value if heads.index else _NONE,
            _NAMES[qkv.dtype], _NAMES[norms.q.dtype], _NAMES[cos_sin.dtype],
        )
    ]  # fmt: skip


def run(
    qkv,
    norms,
    cos_sin,
    positions,
    main_cache,
    index_cache,
    main_slots,
    index_slots,
    heads,
    builds=None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See api.py."""
    (build,) = builds or needs(
        qkv, norms, cos_sin, positions, main_cache, index_cache, main_slots, index_slots, heads
    )
    tokens, dim = qkv.shape[0], heads.head_dim
    q = torch.empty(tokens, heads.q, dim, dtype=qkv.dtype, device=qkv.device)
    index_q = None
    if heads.index:
        index_q = torch.empty(tokens, heads.index, dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q, index_q
    index = _cache_arguments(index_cache, ("k",)) if heads.index else [None, 0, 0, 1.0]
    launcher.launch(
        build,
        (-(-tokens // build.wave_tokens), -(-build.heads // WAVES)),
        [
            qkv, _row_bytes(qkv), tokens,
            norms.q, norms.k, norms.index_q, norms.index_k, float(norms.eps),
            cos_sin, _row_bytes(cos_sin), cos_sin.shape[0],
            *_integers(positions), *_integers(main_slots), *_integers(index_slots),
            *_cache_arguments(main_cache, ("k", "v")), *index, q, index_q,
        ],
        qkv.device,
    )  # fmt: skip
    return q, index_q


def _check_rows(name: str, tensor: torch.Tensor) -> None:
    if tensor.numel() and (
        tensor.stride(1) != 1 or tensor.data_ptr() % ALIGN or _row_bytes(tensor) % ALIGN
    ):
        wanted = f"rows of contiguous values at multiples of {ALIGN} bytes"
        raise NotImplementedError(expect(f"{name} on flydsl", wanted, tuple(tensor.stride())))


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()


def _integers(tensor: torch.Tensor | None) -> list:
    """An int32 or int64 vector: pointer, bytes from one to the next, bytes of the high word."""
    if tensor is None:
        return [None, 0, 0]
    return [tensor, tensor.stride(0) * tensor.element_size(), tensor.element_size() - 4]


def _cache_arguments(cache, sides: tuple[str, ...]) -> list:
    """Pages, block stride in bytes, slots of the cache, global scales."""
    stored_as_is = cache.dtype is CacheDType.BF16
    scales = [1.0 if stored_as_is else float(cache.scales[side]) for side in sides]
    return [cache.pages, cache.block_stride, cache.num_blocks * BLOCK_TOKENS, *scales]


def compile_build(build: Build):
    """rocm_msa.flydsl_compile.Compiled of one kernel."""
    from rocm_msa.ops.qkv_insert import flydsl_kernel

    return flydsl_kernel.compile_build(build)

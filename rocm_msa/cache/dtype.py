"""The one enumeration of cache dtypes, and the strings that name them."""

from __future__ import annotations

import enum

from rocm_msa.errors import expect

NVFP4_GROUP = 16
"""Consecutive values along head_dim that share one E4M3 scale byte."""


class CacheDType(enum.Enum):
    """How one vector (K, V or index key of a token and head) is stored."""

    NVFP4 = "nvfp4"
    FP8 = "fp8"
    BF16 = "bf16"

    @classmethod
    def parse(cls, name: str | CacheDType) -> CacheDType:
        """Read vLLM's cache dtype strings; "auto" is bf16 here.

        Raises:
            ValueError: any other string. FP8 means OCP E4M3 (e4m3fn); FNUZ bytes and E5M2 are
                not among the formats.
        """
        if isinstance(name, cls):
            return name
        if not isinstance(name, str) or name not in _ALIASES:
            raise ValueError(expect("cache dtype", f"one of {sorted(_ALIASES)}", repr(name)))
        return _ALIASES[name]

    def data_bytes(self, head_dim: int) -> int:
        """Bytes of the values of one vector."""
        return {
            CacheDType.NVFP4: head_dim // 2,
            CacheDType.FP8: head_dim,
            CacheDType.BF16: 2 * head_dim,
        }[self]

    def scale_bytes(self, head_dim: int) -> int:
        """Bytes of the block scales of one vector."""
        return head_dim // NVFP4_GROUP if self is CacheDType.NVFP4 else 0

    def vector_bytes(self, head_dim: int) -> int:
        return self.data_bytes(head_dim) + self.scale_bytes(head_dim)


_ALIASES = {
    "nvfp4": CacheDType.NVFP4,
    "fp8": CacheDType.FP8,
    "fp8_e4m3": CacheDType.FP8,
    "bf16": CacheDType.BF16,
    "bfloat16": CacheDType.BF16,
    "auto": CacheDType.BF16,
}

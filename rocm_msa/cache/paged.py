"""Paged caches over raw bytes: slots, writing, reading, views for any block stride.

A cache is a uint8 tensor `[num_blocks, page_bytes]` whose rows may lie any number of bytes apart
(`stride(0)`, the block stride: in an outer-block row the pages of all layers of one block are
neighbours). Token slot = block_id * 128 + offset in the block; slot -1 writes nothing. The byte
order inside a page is `pages.Page`; offsets are 64-bit throughout.

NVFP4 values are x = global_scale * e4m3(scale) * e2m1(code), FP8 values x = global_scale *
e4m3(byte); a cache never holds a NaN: the encoders map non-finite inputs (formats/).
"""

from __future__ import annotations

from numbers import Real
from typing import Self

import torch

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.cache.pages import Page, index_page, main_page
from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.errors import check_int, check_tensor, expect
from rocm_msa.formats import fp8, nvfp4

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_MAX_SCALE = {
    CacheDType.NVFP4: nvfp4.MAX_GLOBAL_SCALE,
    CacheDType.FP8: fp8.MAX_SCALE,
    CacheDType.BF16: torch.finfo(torch.float32).max,
}


class PagedCache:
    """Shared machinery of `MainCache` and `IndexCache`.

    Attributes:
        pages: uint8 `[num_blocks, page_bytes]`, any block stride.
        page: the byte order of a page.
        scales: global scale a side ("k", "v"); bf16 values are stored as they are, without it.
    """

    def __init__(self, pages: torch.Tensor, page: Page, scales: dict[str, float]):
        check_tensor("pages", pages, ["num_blocks", page.page_bytes], torch.uint8)
        rows_overlap = pages.shape[0] > 1 and pages.stride(0) < page.page_bytes
        if pages.numel() and (pages.stride(1) != 1 or rows_overlap):
            raise ValueError(
                expect(
                    "pages.stride()",
                    f"(block stride >= {page.page_bytes}, 1)",
                    tuple(pages.stride()),
                )
            )
        limit = _MAX_SCALE[page.dtype]
        for side, scale in scales.items():
            if isinstance(scale, bool) or not isinstance(scale, Real):
                raise TypeError(expect(f"{side}_scale", "a number", type(scale).__name__))
            if not 0 < scale <= limit:
                raise ValueError(
                    expect(f"{side}_scale", f"a finite number > 0 and <= {limit:g}", scale)
                )
        self.pages, self.page, self.scales = pages, page, scales

    @property
    def num_blocks(self) -> int:
        return self.pages.shape[0]

    @property
    def dtype(self) -> CacheDType:
        return self.page.dtype

    @property
    def kv_heads(self) -> int:
        return self.page.kv_heads

    @property
    def head_dim(self) -> int:
        return self.page.head_dim

    @property
    def block_stride(self) -> int:
        """Bytes from one block's page to the next block's."""
        return self.pages.stride(0)

    def region(self, name: str) -> torch.Tensor:
        """View of one region: uint8 `[num_blocks, kv_heads, 128, row_bytes]`."""
        region = self.page.head_layout[name]
        row = region.nbytes // BLOCK_TOKENS
        return torch.as_strided(
            self.pages,
            (self.num_blocks, self.kv_heads, BLOCK_TOKENS, row),
            (self.pages.stride(0), self.page.head_bytes, row, 1),
            self.pages.storage_offset() + region.offset,
        )

    def encode(self, side: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Stored bytes of vectors `x [..., head_dim]`: (data,) or (data, scales), uint8."""
        if self.dtype is CacheDType.NVFP4:
            data, scales = nvfp4.quantize(x, self.scales[side])
            return data, scales.view(torch.uint8)
        if self.dtype is CacheDType.FP8:
            return (fp8.quantize(x, self.scales[side]).view(torch.uint8),)
        return (_finite_bf16(x).view(torch.uint8),)

    def decode(self, side: str, *stored: torch.Tensor) -> torch.Tensor:
        """Inverse of `encode`: fp32 `[..., head_dim]`."""
        if self.dtype is CacheDType.NVFP4:
            data, scales = stored
            return nvfp4.dequantize(data, scales.view(torch.float8_e4m3fn), self.scales[side])
        (data,) = stored
        if self.dtype is CacheDType.FP8:
            return fp8.dequantize(data.view(torch.float8_e4m3fn), self.scales[side])
        return data.view(torch.bfloat16).float()

    def gather(self, side: str, block_ids: torch.Tensor, head: int) -> torch.Tensor:
        """Dequantised vectors of whole pages: fp32 `[len(block_ids), 128, head_dim]`."""
        stored = [self.region(n)[block_ids, head] for n in self._region_names(side)]
        return self.decode(side, *stored)

    def _region_names(self, side: str) -> list[str]:
        names = [f"{side}_data"]
        if self.dtype is CacheDType.NVFP4:
            names.append(f"{side}_scales")
        return names

    def _write(self, vectors: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        self.check_slots("slots", slots)
        for side, x in vectors.items():
            shape = [len(slots), self.kv_heads, self.head_dim]
            check_tensor(side, x, shape, _FLOATS, device=self.pages.device)
        if len(slots) == 0:
            return
        slots = slots.to(torch.int64)
        live = slots >= 0
        blocks, offsets = slots[live] // BLOCK_TOKENS, slots[live] % BLOCK_TOKENS
        for side, x in vectors.items():
            for name, stored in zip(
                self._region_names(side), self.encode(side, x[live]), strict=True
            ):
                self.region(name)[blocks, :, offsets] = stored

    def check_slots(self, name: str, slots: torch.Tensor, tokens: int | str = "tokens") -> None:
        """Check slots to write, `[tokens]` int64 or int32: -1, or of this cache and distinct."""
        check_tensor(name, slots, [tokens], (torch.int64, torch.int32), device=self.pages.device)
        if len(slots) == 0:
            return
        low, high = int(slots.min()), int(slots.max())
        limit = self.num_blocks * BLOCK_TOKENS
        if low < -1 or high >= limit:
            raise ValueError(expect(name, f"-1 or 0..{limit - 1}", f"{low}..{high}"))
        ordered = slots.sort().values
        twice = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)]
        if len(twice):
            raise ValueError(expect(name, "distinct slots", f"{int(twice[0])} twice"))

    def _check_block(self, block_id: int) -> None:
        check_int("block_id", block_id, 0)
        if block_id >= self.num_blocks:
            raise ValueError(expect("block_id", f"0..{self.num_blocks - 1}", block_id))


class MainCache(PagedCache):
    """K and V of one layer on one rank."""

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        kv_heads: int,
        dtype: CacheDType | str,
        device: torch.device | str = "cpu",
        *,
        head_dim: int = 128,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Self:
        """Zeroed cache of dense pages."""
        check_int("num_blocks", num_blocks, 0)
        page = main_page(kv_heads, head_dim, CacheDType.parse(dtype))
        pages = torch.zeros(num_blocks, page.page_bytes, dtype=torch.uint8, device=device)
        return cls(pages, page, {"k": k_scale, "v": v_scale})

    @classmethod
    def from_tensor(
        cls,
        tensor: torch.Tensor,
        kv_heads: int,
        dtype: CacheDType | str,
        *,
        head_dim: int = 128,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Self:
        """Cache over existing memory: `[num_blocks, ...]` of any dtype, see `page_rows`."""
        page = main_page(kv_heads, head_dim, CacheDType.parse(dtype))
        return cls(page_rows(tensor, page), page, {"k": k_scale, "v": v_scale})

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Encode and store `k`, `v` `[tokens, kv_heads, head_dim]` at `slots [tokens]`.

        Raises:
            ValueError: a slot outside of the cache (other than -1, which writes nothing).
        """
        self._write({"k": k, "v": v}, slots)

    def read(self, block_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantised K and V of a block: fp32 `[128, kv_heads, head_dim]` each."""
        self._check_block(block_id)
        ids = torch.tensor([block_id], device=self.pages.device)
        return tuple(
            torch.stack([self.gather(side, ids, h)[0] for h in range(self.kv_heads)], dim=1)
            for side in ("k", "v")
        )


class IndexCache(PagedCache):
    """The shared index key head of one sparse layer; the same bytes on every rank."""

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        dtype: CacheDType | str,
        device: torch.device | str = "cpu",
        *,
        head_dim: int = 128,
        k_scale: float = 1.0,
    ) -> Self:
        """Zeroed cache of dense pages."""
        check_int("num_blocks", num_blocks, 0)
        page = index_page(head_dim, CacheDType.parse(dtype))
        pages = torch.zeros(num_blocks, page.page_bytes, dtype=torch.uint8, device=device)
        return cls(pages, page, {"k": k_scale})

    @classmethod
    def from_tensor(
        cls,
        tensor: torch.Tensor,
        dtype: CacheDType | str,
        *,
        head_dim: int = 128,
        k_scale: float = 1.0,
    ) -> Self:
        """Cache over existing memory: `[num_blocks, ...]` of any dtype, see `page_rows`."""
        page = index_page(head_dim, CacheDType.parse(dtype))
        return cls(page_rows(tensor, page), page, {"k": k_scale})

    def write(self, k: torch.Tensor, slots: torch.Tensor) -> None:
        """Encode and store `k [tokens, head_dim]` at `slots [tokens]`."""
        check_tensor("k", k, ["tokens", self.head_dim], _FLOATS)
        self._write({"k": k[:, None]}, slots)

    def read(self, block_id: int) -> torch.Tensor:
        """Dequantised index keys of a block: fp32 `[128, head_dim]`."""
        self._check_block(block_id)
        return self.gather("k", torch.tensor([block_id], device=self.pages.device), 0)[0]


def page_rows(tensor: torch.Tensor, page: Page) -> torch.Tensor:
    """View `[num_blocks, ...]` memory as uint8 `[num_blocks, page_bytes]` without a copy.

    Everything after the first dimension must be one contiguous run of exactly `page_bytes` bytes;
    the block stride is free (an outer-block row). Raises ValueError otherwise.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(expect("tensor", "a torch.Tensor", type(tensor).__name__))
    if tensor.dim() < 2:
        raise ValueError(expect("tensor.shape", "[num_blocks, ...]", list(tensor.shape)))
    item = tensor.element_size()
    inner = [1]
    for size in reversed(tensor.shape[2:]):
        inner.insert(0, inner[0] * size)
    got_bytes = inner[0] * tensor.shape[1] * item
    if got_bytes != page.page_bytes:
        raise ValueError(
            expect(
                "bytes a block in tensor",
                f"{page.page_bytes} ({page.kv_heads} heads, {page.dtype.value})",
                got_bytes,
            )
        )
    strides = tensor.stride()[1:]
    wrong = any(
        size > 1 and got != want
        for size, got, want in zip(tensor.shape[1:], strides, inner, strict=True)
    )
    if wrong:
        raise ValueError(expect("tensor.stride()", f"(block stride, *{inner})", tensor.stride()))
    flat = torch.as_strided(
        tensor,
        (tensor.shape[0], got_bytes // item),
        (tensor.stride(0), 1),
        tensor.storage_offset(),
    )
    return flat.view(torch.uint8)


def _finite_bf16(x: torch.Tensor) -> torch.Tensor:
    """bf16 cast, NaN -> 0 with its sign, +-inf -> the largest finite value."""
    # The cast may lose the sign of a NaN.
    zero = torch.copysign(torch.zeros_like(x), x).to(torch.bfloat16)
    x = x.to(torch.bfloat16)
    limit = torch.finfo(torch.bfloat16).max
    return torch.where(x.isnan(), zero, x.clamp(-limit, limit))

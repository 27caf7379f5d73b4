"""Paged caches: bytes in the pages, slots, strides, 64-bit offsets, refusals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_msa.cache import CacheDType, IndexCache, MainCache, index_page, main_page
from rocm_msa.cache.paged import page_rows
from rocm_msa.formats import fp8, nvfp4

DTYPES = ("nvfp4", "fp8", "bf16")
G = 0.25  # a global scale that is not 1


def values(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_formats(x: torch.Tensor, dtype: str, g: float) -> torch.Tensor:
    """What a cache must give back, straight from the formats."""
    if dtype == "nvfp4":
        return nvfp4.dequantize(*nvfp4.quantize(x, g), g)
    if dtype == "fp8":
        return fp8.dequantize(fp8.quantize(x, g), g)
    return x.to(torch.bfloat16).float()


# --- bytes ------------------------------------------------------------------------------------


def test_bytes_of_an_nvfp4_page():
    """One token, all bytes by hand: value i of head h and side s where the layout says."""
    cache = MainCache.allocate(2, 2, "nvfp4", head_dim=32)
    k, v = torch.zeros(1, 2, 32), torch.zeros(1, 2, 32)
    k[0, 1, 0], k[0, 1, 1], k[0, 1, 16] = 6.0, -1.0, 3.0  # scales 1 and 0.5
    v[0, 0, 31] = -6.0
    cache.write(k, v, torch.tensor([128 + 3]))
    row = cache.pages[1].tolist()
    head = cache.page.head_bytes
    assert head == 128 * 36
    expected = {
        head + 3 * 16 + 0: 0xA7,  # k data of head 1: -1.0 is 0xA in the high nibble, 6.0 is 7
        head + 3 * 16 + 8: 0x07,  # 3.0 / 0.5 = 6.0
        head + 2048 + 3 * 2 + 0: 0x38,  # k scales: 1.0
        head + 2048 + 3 * 2 + 1: 0x30,  # 0.5
        2304 + 3 * 16 + 15: 0xF0,  # v data of head 0: -6.0 in the high nibble
        2304 + 2048 + 3 * 2 + 1: 0x38,
    }
    assert {i: b for i, b in enumerate(row) if b} == expected
    assert (cache.pages[0] == 0).all()


def test_bytes_of_fp8_and_bf16_pages():
    k, v = torch.zeros(1, 1, 32), torch.zeros(1, 1, 32)
    k[0, 0, 0], v[0, 0, 31] = 1.0, -2.0
    cache = MainCache.allocate(1, 1, "fp8", head_dim=32)
    cache.write(k, v, torch.tensor([5]))
    assert {i: b for i, b in enumerate(cache.pages[0].tolist()) if b} == {
        5 * 32: 0x38,
        128 * 32 + 5 * 32 + 31: 0xC0,
    }
    cache = MainCache.allocate(1, 1, "bf16", head_dim=32)
    cache.write(k, v, torch.tensor([5]))
    assert {i: b for i, b in enumerate(cache.pages[0].tolist()) if b} == {
        5 * 64: 0x80,
        5 * 64 + 1: 0x3F,
        128 * 64 + 5 * 64 + 63: 0xC0,
    }


def test_bytes_of_an_index_page():
    cache = IndexCache.allocate(2, "nvfp4", head_dim=32)
    k = torch.zeros(1, 32)
    k[0, 2] = 6.0
    cache.write(k, torch.tensor([127]))
    assert {i: b for i, b in enumerate(cache.pages[0].tolist()) if b} == {
        127 * 16 + 1: 0x07,
        128 * 16 + 127 * 2: 0x38,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 128), (4, 128), (2, 32), (3, 64)])
def test_round_trip_is_quantise_then_dequantise(dtype, input_dtype, kv_heads, head_dim):
    scales = {} if dtype == "bf16" else {"k_scale": G, "v_scale": 2 * G}
    cache = MainCache.allocate(3, kv_heads, dtype, head_dim=head_dim, **scales)
    k, v = (values(s, 128, kv_heads, head_dim, dtype=input_dtype) for s in (1, 2))
    cache.write(k, v, 256 + torch.arange(128))
    got_k, got_v = cache.read(2)
    assert torch.equal(got_k, by_formats(k, dtype, G))
    assert torch.equal(got_v, by_formats(v, dtype, 2 * G))


@pytest.mark.parametrize("dtype", DTYPES)
def test_index_round_trip(dtype):
    cache = IndexCache.allocate(2, dtype, **({} if dtype == "bf16" else {"k_scale": G}))
    k = values(3, 128, 128)
    cache.write(k, torch.arange(128))
    assert torch.equal(cache.read(0), by_formats(k, dtype, G))


@settings(max_examples=40, deadline=None)
@given(
    slots=st.lists(st.integers(0, 4 * 128 - 1), unique=True, max_size=40),
    dead=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
)
def test_any_slots_in_any_order(slots, dead, dtype, seed):
    """Each token lands in its slot, -1 nowhere, and no other byte changes."""
    slots = torch.tensor(slots + [-1] * dead, dtype=torch.int64)
    slots = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed))]
    cache = MainCache.allocate(4, 2, dtype, head_dim=32)
    cache.pages.fill_(0xFF)
    k, v = values(seed, len(slots), 2, 32), values(seed + 1, len(slots), 2, 32)
    cache.write(k, v, slots)
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for side, x in (("k", k), ("v", v)):
            names = [n for n in (f"{side}_data", f"{side}_scales") if n in cache.page.head_layout]
            for name, data in zip(names, cache.encode(side, x[t]), strict=True):
                place = cache.region(name)[slot // 128, :, slot % 128]
                assert torch.equal(place, data)
                place.fill_(0xFF)
    assert (cache.pages == 0xFF).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_never_holds_a_nan(dtype):
    cache = IndexCache.allocate(1, dtype, head_dim=32)
    x = torch.zeros(4, 32)
    x[0, 3], x[1, 4], x[2, 5], x[3, 6] = math.nan, math.inf, -math.inf, -math.nan
    cache.write(x, torch.arange(4))
    got = cache.read(0)[:4]
    assert got.isfinite().all()
    assert got[0, 3] == 0 and got[1, 4] > 400 and got[2, 5] < -400 and got[3, 6] == 0


def test_bf16_saturates_and_keeps_the_sign_of_zero():
    cache = IndexCache.allocate(1, "bf16", head_dim=32)
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([3.4e38, -3.4e38, -0.0, math.nan, -math.nan])
    cache.write(x, torch.tensor([0]))
    got = cache.read(0)[0, :5]
    limit = torch.finfo(torch.bfloat16).max
    assert got.tolist() == [limit, -limit, 0.0, 0.0, 0.0]
    assert got.signbit().tolist() == [False, True, True, False, True]


def test_c42_bytes_decode_as_ocp_e4m3():
    """0x40 is 2.0 and 0x80 is -0.0 (in FNUZ 1.0 and NaN)."""
    cache = IndexCache.allocate(1, "fp8", head_dim=32)
    cache.pages[0, :2] = torch.tensor([0x40, 0x80], dtype=torch.uint8)
    got = cache.read(0)[0]
    assert got[:2].tolist() == [2.0, 0.0] and got[1].signbit()


def test_c43_the_largest_fp8_value_is_448():
    cache = IndexCache.allocate(1, "fp8", head_dim=32)
    cache.write(torch.full((1, 32), 448.0), torch.tensor([0]))
    assert (cache.read(0)[0] == 448.0).all()


def test_k_and_v_scales_belong_to_their_side():
    cache = MainCache.allocate(1, 1, "fp8", head_dim=32, k_scale=2.0, v_scale=4.0)
    one = torch.full((1, 1, 32), 8.0)
    cache.write(one, one, torch.tensor([0]))
    assert cache.region("k_data")[0, 0, 0, 0] == 0x48 and cache.region("v_data")[0, 0, 0, 0] == 0x40
    k, v = cache.read(0)
    assert (k[0] == 8.0).all() and (v[0] == 8.0).all()


# --- where pages lie --------------------------------------------------------------------------


def test_c32_heads_in_order_with_distinct_bytes():
    """TP1 -> TP4: rank h's page is head h's run of the 4-head page."""
    whole = MainCache.allocate(2, 4, "nvfp4")
    k, v = values(1, 256, 4, 128), values(2, 256, 4, 128)
    whole.write(k, v, torch.arange(256))
    for h in range(4):
        rank = MainCache.allocate(2, 1, "nvfp4")
        rank.write(k[:, h : h + 1], v[:, h : h + 1], torch.arange(256))
        run = slice(h * whole.page.head_bytes, (h + 1) * whole.page.head_bytes)
        assert torch.equal(whole.pages[:, run], rank.pages)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("before", "after"), [(0, 16), (16, 0), (48, 4096), (7, 9)])
def test_outer_block_rows_of_any_stride(dtype, before, after):
    page = main_page(2, 32, CacheDType.parse(dtype))
    rows = torch.full((3, before + page.page_bytes + after), 0xEE, dtype=torch.uint8)
    inside = rows[:, before : before + page.page_bytes]
    cache = MainCache.from_tensor(inside, 2, dtype, head_dim=32)
    assert cache.block_stride == rows.shape[1] and cache.pages.data_ptr() == inside.data_ptr()
    dense = MainCache.allocate(3, 2, dtype, head_dim=32)
    k, v = values(1, 384, 2, 32), values(2, 384, 2, 32)
    slots = torch.randperm(384, generator=torch.Generator().manual_seed(1))
    for c in (cache, dense):
        c.write(k, v, slots)
    assert torch.equal(inside, dense.pages)
    assert (rows[:, :before] == 0xEE).all() and (rows[:, before + page.page_bytes :] == 0xEE).all()
    assert torch.equal(cache.read(1)[0], dense.read(1)[0])


def test_layers_of_one_outer_block_do_not_touch_each_other():
    main, index = main_page(1, 128, CacheDType.NVFP4), index_page(128, CacheDType.NVFP4)
    sizes = [main.page_bytes, index.page_bytes] * 3
    rows = torch.zeros(4, sum(sizes), dtype=torch.uint8)
    start, caches = 0, []
    for layer, size in enumerate(sizes):
        part = rows[:, start : start + size]
        if layer % 2:
            caches.append(IndexCache.from_tensor(part, "nvfp4"))
        else:
            caches.append(MainCache.from_tensor(part, 1, "nvfp4"))
        start += size
    slots = torch.arange(512)
    data = [[values(10 * i + s, 512, 128) for s in (0, 1)] for i in range(6)]
    for cache, (k, v) in zip(caches, data, strict=True):
        if isinstance(cache, MainCache):
            cache.write(k[:, None], v[:, None], slots)
        else:
            cache.write(k, slots)
    for cache, pair in zip(caches, data, strict=True):
        want_k, want_v = (by_formats(x, "nvfp4", 1.0).view(4, 128, 128) for x in pair)
        for block in range(4):
            got = cache.read(block)
            if isinstance(cache, MainCache):
                assert torch.equal(got[1][:, 0], want_v[block])
                got = got[0][:, 0]
            assert torch.equal(got, want_k[block])


@pytest.mark.parametrize(
    ("dtype", "row_bytes", "block"),
    [("fp8", 2_899_968, 741), ("nvfp4", 2_082_816, 1032), ("fp8", 2_899_968, 1490)],
)
def test_blocks_beyond_2_31_and_2_32_bytes(dtype, row_bytes, block):
    """Virtual memory only: untouched pages of the allocation cost nothing."""
    assert (block - 1) * row_bytes < 2**31 <= block * row_bytes or block * row_bytes > 2**32
    page = main_page(1, 128, CacheDType.parse(dtype))
    storage = torch.empty((block + 2) * row_bytes, dtype=torch.uint8)
    tensor = torch.as_strided(storage, (block + 2, page.page_bytes), (row_bytes, 1), 4096)
    cache = MainCache.from_tensor(tensor, 1, dtype)
    index = IndexCache.from_tensor(
        torch.as_strided(
            storage,
            (block + 2, index_page(128, CacheDType.parse(dtype)).page_bytes),
            (row_bytes, 1),
            4096 + page.page_bytes,
        ),
        dtype,
    )
    k, v = values(1, 256, 1, 128), values(2, 256, 1, 128)
    slots = block * 128 + torch.arange(256)
    cache.write(k, v, slots)
    index.write(k[:, 0], slots)
    for b in (0, 1):
        part = slice(128 * b, 128 * b + 128)
        got_k, got_v = cache.read(block + b)
        assert torch.equal(got_k, by_formats(k[part], dtype, 1.0))
        assert torch.equal(got_v, by_formats(v[part], dtype, 1.0))
        assert torch.equal(index.read(block + b), by_formats(k[part, 0], dtype, 1.0))
    at = block * row_bytes + 4096
    first = cache.encode("k", k[0])[0].flatten()
    assert torch.equal(storage[at : at + len(first)], first)


def test_int32_slots_beyond_2_31_bytes():
    """slot * bytes passes 2^31 although the slot fits in 32 bits."""
    page = index_page(128, CacheDType.NVFP4)
    blocks = 2**31 // page.page_bytes + 2
    storage = torch.empty(blocks * page.page_bytes, dtype=torch.uint8)
    cache = IndexCache.from_tensor(storage.view(blocks, -1), "nvfp4")
    k = values(1, 1, 128)
    cache.write(k, torch.tensor([(blocks - 1) * 128 + 127], dtype=torch.int32))
    assert torch.equal(cache.read(blocks - 1)[127], by_formats(k[0], "nvfp4", 1.0))


# --- page_rows --------------------------------------------------------------------------------

PAGE = main_page(2, 32, CacheDType.FP8)  # 16384 bytes


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 16384), torch.uint8),
        ((3, 2, 2, 128, 32), torch.float8_e4m3fn),
        ((3, 8192), torch.bfloat16),
        ((3, 1, 4096, 1), torch.int32),
        ((0, 16384), torch.uint8),
        ((1, 128, 128), torch.int8),
    ],
)
def test_page_rows_take_any_dtype_and_shape_without_a_copy(shape, dtype):
    tensor = torch.zeros(shape, dtype=dtype)
    rows = page_rows(tensor, PAGE)
    assert rows.shape == (shape[0], 16384) and rows.dtype == torch.uint8
    assert rows.data_ptr() == tensor.data_ptr()


def test_page_rows_of_a_strided_bf16_row():
    tensor = torch.zeros(3, 9000, dtype=torch.bfloat16)[:, 100 : 100 + 8192]
    rows = page_rows(tensor, PAGE)
    assert rows.stride() == (18000, 1) and rows.data_ptr() == tensor.data_ptr()

"""What the paged caches refuse: the message names the argument, what was expected and what came."""

import math

import pytest
import torch

from rocm_msa.cache import IndexCache, MainCache

DTYPES = ("nvfp4", "fp8", "bf16")


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (
            torch.zeros(16384, dtype=torch.uint8),
            ValueError,
            r"tensor\.shape.*\[num_blocks, ",
        ),
        (torch.zeros(3, 16383, dtype=torch.uint8), ValueError, "bytes a block.*16384.*16383"),
        (torch.zeros(3, 16384, dtype=torch.int16), ValueError, "bytes a block.*16384.*32768"),
        (torch.zeros(3, 2, 8200, dtype=torch.uint8)[..., :8192], ValueError, r"tensor\.stride"),
        (torch.zeros(3, 64, 256, dtype=torch.uint8).transpose(1, 2), ValueError, r"tensor\.stride"),
        (torch.zeros(2, 3, 8192, dtype=torch.uint8).transpose(0, 1), ValueError, r"tensor\.stride"),
        (torch.zeros(1, 16384, dtype=torch.uint8).expand(3, -1), ValueError, r"pages\.stride"),
        (None, TypeError, r"tensor.*torch\.Tensor.*NoneType"),
    ],
)
def test_page_rows_refusals(tensor, error, message):
    with pytest.raises(error, match=message):
        MainCache.from_tensor(tensor, 2, "fp8", head_dim=32)


def test_c37_a_cache_of_another_dtype_or_head_count_is_refused():
    tensor = MainCache.allocate(3, 2, "nvfp4", head_dim=32).pages
    for kv_heads, dtype in ((2, "fp8"), (2, "bf16"), (1, "nvfp4"), (4, "nvfp4")):
        with pytest.raises(ValueError, match=f"bytes a block.*{kv_heads} heads, {dtype}.*got 9216"):
            MainCache.from_tensor(tensor, kv_heads, dtype, head_dim=32)


# --- refusals of write and read ---------------------------------------------------------------

K = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(1))
SLOTS = torch.tensor([0, 200, -1])


@pytest.mark.parametrize(
    ("k", "v", "slots", "error", "message"),
    [
        (K, K, SLOTS + 56, ValueError, r"slots: expected -1 or 0\.\.255, got .*256"),
        (K, K, SLOTS - 1, ValueError, r"slots: expected -1 or 0\.\.255, got -2\.\."),
        (K, K, torch.tensor([2**40, 0, 1]), ValueError, r"slots.*1099511627776"),
        (K, K, torch.tensor([7, 7, -1]), ValueError, "slots: expected distinct slots, got 7 twice"),
        (K, K, SLOTS.float(), TypeError, r"slots\.dtype.*int64 or .*int32.*float32"),
        (K, K, SLOTS.bool(), TypeError, r"slots\.dtype.*bool"),
        (K, K, SLOTS[None], ValueError, r"slots\.shape.*\[tokens\].*\[1, 3\]"),
        (K, K, [0, 1, 2], TypeError, r"slots.*torch\.Tensor.*list"),
        (K, K, SLOTS.to("meta"), ValueError, r"slots\.device.*cpu.*meta"),
        (K[:2], K, SLOTS, ValueError, r"k\.shape.*\[3, 2, 32\].*\[2, 2, 32\]"),
        (K, K[:, :1], SLOTS, ValueError, r"v\.shape.*\[3, 2, 32\].*\[3, 1, 32\]"),
        (K, K[..., :16], SLOTS, ValueError, r"v\.shape.*\[3, 2, 32\].*\[3, 2, 16\]"),
        (K.double(), K, SLOTS, TypeError, r"k\.dtype.*float64"),
        (K, K.to(torch.float8_e4m3fn), SLOTS, TypeError, r"v\.dtype.*float8"),
        (K, K.to("meta"), SLOTS, ValueError, r"v\.device.*cpu.*meta"),
        (K, None, SLOTS, TypeError, r"v.*torch\.Tensor.*NoneType"),
    ],
)
def test_bad_writes_are_named_and_write_nothing(k, v, slots, error, message):
    cache = MainCache.allocate(2, 2, "nvfp4", head_dim=32)
    with pytest.raises(error, match=message):
        cache.write(k, v, slots)
    assert (cache.pages == 0).all()


@pytest.mark.parametrize(
    ("k", "error", "message"),
    [
        (K, ValueError, r"k\.shape.*\[tokens, 32\].*\[3, 2, 32\]"),
        (K[:2, 0], ValueError, r"k\.shape.*3.*2"),
        (K[:, 0, :16], ValueError, r"k\.shape.*32.*16"),
        (None, TypeError, r"k.*torch\.Tensor.*NoneType"),
    ],
)
def test_bad_index_writes_are_named(k, error, message):
    with pytest.raises(error, match=message):
        IndexCache.allocate(2, "nvfp4", head_dim=32).write(k, SLOTS)


def test_minus_one_may_come_many_times_and_no_tokens_are_fine():
    cache = MainCache.allocate(1, 2, "bf16", head_dim=32)
    cache.write(K, K, torch.tensor([-1, -1, -1]))
    cache.write(K[:0], K[:0], SLOTS[:0])
    assert (cache.pages == 0).all()
    MainCache.allocate(0, 2, "bf16", head_dim=32).write(K[:0], K[:0], SLOTS[:0])


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (2, ValueError, r"block_id.*0\.\.1.*2"),
        (-1, ValueError, "block_id.*>= 0.*-1"),
        (1.0, TypeError, r"block_id.*an int.*1\.0"),
    ],
)
def test_bad_reads_are_named(block, error, message):
    with pytest.raises(error, match=message):
        MainCache.allocate(2, 1, "fp8", head_dim=32).read(block)
    with pytest.raises(error, match=message):
        IndexCache.allocate(2, "fp8", head_dim=32).read(block)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize(
    ("scale", "error"),
    [
        (0.0, ValueError),
        (-1.0, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        ("1", TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_bad_scales_are_named(dtype, side, scale, error):
    with pytest.raises(error, match=f"{side}_scale: expected a"):
        MainCache.allocate(1, 1, dtype, head_dim=32, **{f"{side}_scale": scale})


@pytest.mark.parametrize(("dtype", "limit"), [("nvfp4", 1.5 * 2.0**116), ("fp8", 2.0**119)])
def test_a_scale_that_the_format_cannot_use_is_refused_at_once(dtype, limit):
    IndexCache.allocate(1, dtype, k_scale=limit)
    with pytest.raises(ValueError, match=r"k_scale.*<="):
        IndexCache.allocate(1, dtype, k_scale=limit * 1.01)


def test_allocate_refuses_a_negative_size():
    with pytest.raises(ValueError, match=r"num_blocks.*>= 0.*-1"):
        MainCache.allocate(-1, 1, "fp8")
    with pytest.raises(TypeError, match=r"num_blocks.*an int.*2\.5"):
        IndexCache.allocate(2.5, "fp8")

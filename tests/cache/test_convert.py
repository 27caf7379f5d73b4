"""Conversion to and from vLLM's NVFP4 packing, against vLLM's own view helpers."""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

from rocm_msa.cache import CacheDType, MainCache, index_page, main_page
from rocm_msa.cache.convert import from_vllm, to_vllm

HEADS = [1, 2, 4]
ORDERS = ["HND", "NHD"]


@pytest.fixture(scope="module")
def split_data_scale():
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.utils.torch_utils import nvfp4_split_data_scale

    return nvfp4_split_data_scale


@pytest.fixture(scope="module")
def vllm_views(split_data_scale):
    """`_nvfp4_kv_views` of vLLM's flashinfer backend, whose module needs flashinfer to import."""
    root = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    source = (root / "v1/attention/backends/flashinfer.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == "_nvfp4_kv_views":
            scope = {"torch": torch, "nvfp4_split_data_scale": split_data_scale, "_KVPair": tuple}
            exec(compile(ast.Module([node], []), "flashinfer.py", "exec"), scope)
            return scope["_nvfp4_kv_views"]
    pytest.skip("this vllm has no _nvfp4_kv_views")


def random_pages(blocks: int, nbytes: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (blocks, nbytes), dtype=torch.uint8, generator=generator)


def vllm_cache(pages: torch.Tensor, heads: int, order: str, dim: int) -> torch.Tensor:
    """The logical `[blocks, 2 * heads, 128, full_dim]` tensor that vLLM holds over such pages."""
    full = dim // 2 + dim // 16
    if order == "HND":
        return pages.view(len(pages), 2 * heads, 128, full)
    return pages.view(len(pages), 128, 2 * heads, full).transpose(1, 2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dim", [32, 128])
def test_every_byte_is_where_vllms_views_say(vllm_views, heads, order, dim):
    page = main_page(heads, dim, CacheDType.NVFP4)
    theirs = random_pages(3, page.page_bytes)
    data, scales, got_order = vllm_views(vllm_cache(theirs, heads, order, dim), heads)
    assert got_order == order
    ours = MainCache(from_vllm(theirs, page, order), page, {"k": 1.0, "v": 1.0})
    for side in range(2):
        by_head = [data[side], scales[side].view(torch.uint8)]
        if order == "NHD":
            by_head = [x.transpose(1, 2) for x in by_head]
        name = "kv"[side]
        assert torch.equal(ours.region(f"{name}_data"), by_head[0])
        assert torch.equal(ours.region(f"{name}_scales"), by_head[1])


@pytest.mark.parametrize("order", ORDERS)
def test_values_written_through_vllms_views_are_read_by_us(vllm_views, order):
    """The whole way: encode, store by vLLM's views, convert, decode as K and V."""
    page = main_page(2, 32, CacheDType.NVFP4)
    ours = MainCache.allocate(3, 2, "nvfp4", head_dim=32)
    k, v = (torch.randn(384, 2, 32, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    ours.write(k, v, torch.arange(384))
    theirs = torch.full((3, page.page_bytes), 0xFF, dtype=torch.uint8)
    data, scales, _ = vllm_views(vllm_cache(theirs, 2, order, 32), 2)
    for side, (name, x) in enumerate((("k", k), ("v", v))):
        packed, block_scales = ours.encode(name, x.view(3, 128, 2, 32))
        for target, source in (
            (data[side], packed),
            (scales[side].view(torch.uint8), block_scales),
        ):
            target.copy_(source if order == "NHD" else source.transpose(1, 2))
    assert torch.equal(from_vllm(theirs, page, order), ours.pages)
    assert torch.equal(to_vllm(ours.pages, page, order), theirs)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads", [*HEADS, 3])
def test_there_and_back_is_the_identity(heads, order):
    page = main_page(heads, 64, CacheDType.NVFP4)
    pages = random_pages(2, page.page_bytes)
    assert torch.equal(to_vllm(from_vllm(pages, page, order), page, order), pages)
    assert torch.equal(from_vllm(to_vllm(pages, page, order), page, order), pages)


def test_it_is_a_permutation_of_bytes():
    page = main_page(4, 128, CacheDType.NVFP4)
    bytes_by_position = torch.arange(page.page_bytes) % 251
    pages = bytes_by_position.to(torch.uint8)[None]
    for order in ORDERS:
        got = from_vllm(pages, page, order)
        assert torch.equal(got.flatten().bincount(), pages.flatten().bincount())


def test_one_head_is_the_same_bytes():
    """What every rank holds at TP4: no conversion is needed."""
    for page in (main_page(1, 128, CacheDType.NVFP4), index_page(128, CacheDType.NVFP4)):
        pages = random_pages(2, page.page_bytes)
        for order in ORDERS:
            assert torch.equal(from_vllm(pages, page, order), pages)


def test_c32_orders_differ_with_several_heads():
    page = main_page(4, 128, CacheDType.NVFP4)
    pages = random_pages(1, page.page_bytes)
    results = [pages, from_vllm(pages, page, "HND"), from_vllm(pages, page, "NHD")]
    for i in range(3):
        for j in range(i):
            assert not torch.equal(results[i], results[j])


def test_pages_of_an_outer_block_row():
    page = main_page(2, 32, CacheDType.NVFP4)
    rows = random_pages(3, page.page_bytes + 160)
    inside = rows[:, 64 : 64 + page.page_bytes]
    assert torch.equal(from_vllm(inside, page), from_vllm(inside.contiguous(), page))


PAGE = main_page(2, 32, CacheDType.NVFP4)
PAGES = torch.zeros(2, PAGE.page_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("convert", [from_vllm, to_vllm])
@pytest.mark.parametrize(
    ("pages", "page", "order", "error", "message"),
    [
        (PAGES[:, :-1], PAGE, "HND", ValueError, r"pages\.shape.*9216.*9215"),
        (PAGES[0], PAGE, "HND", ValueError, r"pages\.shape.*num_blocks"),
        (PAGES.float(), PAGE, "HND", TypeError, r"pages\.dtype.*uint8.*float32"),
        (PAGES, PAGE, "hnd", ValueError, "order.*'HND' or 'NHD'.*'hnd'"),
        (
            torch.zeros(2, 16384, dtype=torch.uint8),
            main_page(2, 32, CacheDType.FP8),
            "HND",
            NotImplementedError,
            r"page\.dtype.*nvfp4.*fp8",
        ),
    ],
)
def test_bad_input_is_named(convert, pages, page, order, error, message):
    with pytest.raises(error, match=message):
        convert(pages, page, order)

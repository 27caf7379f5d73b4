"""Page layouts: the byte order, the bytes a token, and the cache dtype names."""

import pytest

from rocm_msa.cache import CacheDType, index_page, main_page
from rocm_msa.cache.pages import REGION_ALIGN
from rocm_msa.config import ModelConfig

NVFP4, FP8, BF16 = CacheDType.NVFP4, CacheDType.FP8, CacheDType.BF16
LAYERS = 60


def m3() -> ModelConfig:
    """The public geometry, as a config.json has it."""
    freq = [0] * 3 + [1] * (LAYERS - 3)
    return ModelConfig.from_hf(
        {
            "hidden_size": 6144,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "rope_theta": 5000000,
            "rotary_dim": 64,
            "vocab_size": 200064,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "intermediate_size": 3072,
            "dense_intermediate_size": 12288,
            "moe_layer_freq": freq,
            "sparse_attention_config": {
                "sparse_attention_freq": freq,
                "sparse_num_index_heads": 4,
                "sparse_index_dim": 128,
                "sparse_block_size": 128,
                "sparse_topk_blocks": 16,
            },
        }
    )


@pytest.mark.parametrize(
    ("dtype", "regions"),
    [
        (
            NVFP4,
            {
                "k_data": (0, 8192),
                "k_scales": (8192, 1024),
                "v_data": (9216, 8192),
                "v_scales": (17408, 1024),
            },
        ),
        (FP8, {"k_data": (0, 16384), "v_data": (16384, 16384)}),
        (BF16, {"k_data": (0, 32768), "v_data": (32768, 32768)}),
    ],
)
def test_offsets_of_a_main_head_at_head_dim_128(dtype, regions):
    """The table of docs/formats.md."""
    page = main_page(4, 128, dtype)
    assert {r.name: (r.offset, r.nbytes) for r in page.head_layout} == regions
    assert page.page_bytes == 4 * page.head_bytes


@pytest.mark.parametrize(
    ("dtype", "regions"),
    [
        (NVFP4, {"k_data": (0, 8192), "k_scales": (8192, 1024)}),
        (FP8, {"k_data": (0, 16384)}),
        (BF16, {"k_data": (0, 32768)}),
    ],
)
def test_offsets_of_an_index_page_at_head_dim_128(dtype, regions):
    page = index_page(128, dtype)
    assert {r.name: (r.offset, r.nbytes) for r in page.head_layout} == regions
    assert page.page_bytes == page.head_bytes


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", list(CacheDType))
def test_regions_fill_a_page_and_are_aligned(kv_heads, head_dim, dtype):
    for page in (main_page(kv_heads, head_dim, dtype), index_page(head_dim, dtype)):
        end = 0
        for region in page.head_layout:
            assert region.offset == end and region.offset % REGION_ALIGN == 0
            end = region.end
        assert end == page.head_bytes and page.head_bytes % REGION_ALIGN == 0
        vectors = page.kv_heads * len(page.sides)
        assert page.token_bytes == vectors * dtype.vector_bytes(head_dim)
        assert page.page_bytes == 128 * page.token_bytes


@pytest.mark.parametrize(("dtype", "nbytes"), [(NVFP4, 72), (FP8, 128), (BF16, 256)])
def test_bytes_of_a_token_head_and_side(dtype, nbytes):
    assert dtype.vector_bytes(128) == nbytes
    assert index_page(128, dtype).token_bytes == nbytes
    assert main_page(1, 128, dtype).token_bytes == 2 * nbytes


@pytest.mark.parametrize(("dtype", "nbytes"), [(NVFP4, 34_560), (FP8, 61_440), (BF16, 122_880)])
def test_main_bytes_of_a_token_in_all_layers(dtype, nbytes):
    model = m3()
    page = main_page(model.kv_heads, model.head_dim, dtype)
    assert model.num_layers * page.token_bytes == nbytes


def test_nvfp4_saves_43_75_percent_of_fp8():
    assert 1 - main_page(4, 128, NVFP4).token_bytes / main_page(4, 128, FP8).token_bytes == 0.4375


def test_outer_block_of_a_rank_at_tp4():
    model = m3()
    rank = model.shard(4)
    main = main_page(rank.kv_heads, model.head_dim, NVFP4).page_bytes
    index = index_page(model.index_dim, NVFP4).page_bytes
    assert (main, index) == (128 * 144, 128 * 72)
    assert model.num_layers * main + model.num_sparse_layers * index == 1_631_232


def test_c29_mixed_dtypes_sum_layer_by_layer():
    """3 fp8 dense layers, 57 NVFP4 ones and 57 fp8 index pages, of one KV head."""

    def block(dense, sparse, index):
        layers = 3 * main_page(1, 128, dense).page_bytes + 57 * main_page(1, 128, sparse).page_bytes
        return layers + 57 * index_page(128, index).page_bytes

    assert block(FP8, NVFP4, FP8) == 2_082_816
    assert block(FP8, FP8, FP8) == 2_899_968


def test_the_index_page_is_the_same_on_every_rank():
    assert index_page(128, NVFP4).kv_heads == 1


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("nvfp4", NVFP4),
        ("fp8", FP8),
        ("fp8_e4m3", FP8),
        ("bf16", BF16),
        ("bfloat16", BF16),
        ("auto", BF16),
        (FP8, FP8),
    ],
)
def test_c44_one_enumeration_of_dtype_names(name, dtype):
    assert CacheDType.parse(name) is dtype


@pytest.mark.parametrize(
    "name", ["FP8", "NVFP4", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_inc", "fp4", "", " fp8", None, 8, []]
)
def test_c42_c44_other_names_are_refused(name):
    with pytest.raises(ValueError, match=r"cache dtype: expected one of \['auto'.*got"):
        CacheDType.parse(name)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "error", "message"),
    [
        (0, 128, ValueError, "kv_heads.*>= 1.*0"),
        (-2, 128, ValueError, "kv_heads.*>= 1.*-2"),
        (2.0, 128, TypeError, r"kv_heads.*an int.*2\.0"),
        (True, 128, TypeError, "kv_heads.*an int.*True"),
        (1, 0, ValueError, "head_dim.*>= 1.*0"),
        (1, 48, ValueError, "head_dim.*multiple of 32.*48"),
        (1, 100, ValueError, "head_dim.*multiple of 32.*100"),
    ],
)
def test_bad_pages_are_refused(kv_heads, head_dim, error, message):
    with pytest.raises(error, match=message):
        main_page(kv_heads, head_dim, NVFP4)

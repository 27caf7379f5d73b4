"""layout: regions of a buffer, in order and without overlap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_msa.layout import Layout, Region, pack, round_up


@pytest.mark.parametrize(
    ("value", "multiple", "want"), [(0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 16, 32), (5, 1, 5)]
)
def test_round_up(value, multiple, want):
    assert round_up(value, multiple) == want


def test_pack_aligns_every_region_and_the_total():
    layout = pack([("a", 5), ("b", 0), ("c", 16), ("d", 1)], align=8, total_align=64)
    assert [(r.name, r.offset, r.nbytes) for r in layout] == [
        ("a", 0, 5),
        ("b", 8, 0),
        ("c", 8, 16),
        ("d", 24, 1),
    ]
    assert layout.nbytes == 64 and layout["c"].end == 24


def test_pack_of_nothing():
    assert pack([]).nbytes == 0 and list(pack([])) == []


@given(
    sizes=st.lists(st.integers(0, 10_000), max_size=12),
    align=st.sampled_from([1, 4, 16, 256]),
    total=st.sampled_from([1, 128, 4096]),
)
def test_pack_never_overlaps_and_wastes_less_than_the_alignment(sizes, align, total):
    layout = pack([(f"r{i}", n) for i, n in enumerate(sizes)], align=align, total_align=total)
    end = 0
    for region, size in zip(layout, sizes, strict=True):
        assert region.nbytes == size and region.offset % align == 0
        assert 0 <= region.offset - end < align
        end = region.end
    assert layout.nbytes % total == 0 and 0 <= layout.nbytes - end < total


def test_look_up_by_name():
    layout = pack([("k_data", 4), ("k_scales", 2)])
    assert "k_data" in layout and "v_data" not in layout
    assert layout["k_scales"] == Region("k_scales", 4, 2)
    with pytest.raises(KeyError, match=r"no region 'v_data'; have \['k_data', 'k_scales'\]"):
        layout["v_data"]


@pytest.mark.parametrize(
    ("regions", "nbytes", "message"),
    [
        ((Region("a", 0, 4), Region("a", 4, 4)), 8, "duplicate region names"),
        ((Region("a", 0, 4), Region("b", 3, 4)), 8, "'b'.*overlaps the one before"),
        ((Region("b", 4, 4), Region("a", 0, 4)), 8, "'a'.*overlaps the one before"),
        ((Region("a", 0, -4),), 8, "'a'.*overlaps|negative"),
        ((Region("a", -4, 8),), 8, "'a'.*overlaps"),
        ((Region("a", 0, 4), Region("b", 4, 5)), 8, "8 bytes ends before its last region"),
    ],
)
def test_faulty_layouts_are_refused(regions, nbytes, message):
    with pytest.raises(ValueError, match=message):
        Layout(regions, nbytes)


def test_layouts_compare_by_content():
    assert pack([("a", 4)]) == pack([("a", 4)]) != pack([("a", 5)])
    assert hash(pack([("a", 4)])) == hash(pack([("a", 4)]))

"""qkv_insert against the oracle: norms, RoPE, one rounding, and the bytes in the pages."""

import dataclasses
import math

import pytest
import torch

from rocm_msa.cache import IndexCache, MainCache
from rocm_msa.ops import Heads, Norms, qkv_insert
from tests.ops import oracle
from tests.ops.cases import DTYPES, empty_cache, int32, queries, random_values

HEADS = Heads(q=4, kv=2, index=2, head_dim=32, rotary_dim=16)
MAX_POSITION = 300


def norms_of(heads: Heads, seed: int = 50, dtype=torch.bfloat16) -> Norms:
    w = [random_values(seed + i, heads.head_dim, scale=0.1).to(dtype) for i in range(4)]
    return Norms(*(w if heads.index else w[:2]))


def table_of(heads: Heads, dtype=torch.float32) -> torch.Tensor:
    half = heads.rotary_dim // 2
    angle = torch.outer(torch.arange(MAX_POSITION).float(), 0.1 ** torch.arange(half).float())
    return torch.cat([angle.cos(), angle.sin()], -1).to(dtype)


class Step:
    """One call: tokens with their slots, over poisoned caches."""

    def __init__(self, tokens=7, heads=HEADS, dtype="nvfp4", index_dtype=None, qkv_dtype=None):
        self.heads = heads
        self.qkv = queries(1, tokens, heads.qkv_columns, dtype=qkv_dtype or torch.bfloat16)
        self.norms, self.cos_sin = norms_of(heads), table_of(heads)
        order = torch.Generator().manual_seed(2)
        self.positions = torch.randperm(MAX_POSITION, generator=order)[:tokens]
        self.main_slots = torch.randperm(4 * 128, generator=order)[:tokens]
        self.index_slots = torch.randperm(4 * 128, generator=order)[:tokens]
        self.main = empty_cache(MainCache, 4, dtype, heads.kv, heads.head_dim, 32)
        self.index = empty_cache(IndexCache, 4, index_dtype or dtype, 1, heads.head_dim, 32)
        if not heads.index:
            self.index = self.index_slots = None

    def arguments(self) -> dict:
        return {
            "qkv": self.qkv,
            "norms": self.norms,
            "cos_sin": self.cos_sin,
            "positions": self.positions,
            "main_cache": self.main,
            "index_cache": self.index,
            "main_slots": self.main_slots,
            "index_slots": self.index_slots,
            "heads": self.heads,
        }

    def run(self, rows=slice(None), **options):
        per_token = ("qkv", "positions", "main_slots", "index_slots")
        arguments = self.arguments()
        for name in per_token:
            if arguments[name] is not None:
                arguments[name] = arguments[name][rows]
        return qkv_insert(**arguments, **options)

    def part(self, t: int, head: int) -> torch.Tensor:
        """Head `head` of token t of the fused projection, counted over q, k, v, index q, k."""
        return self.qkv[t].view(-1, self.heads.head_dim)[head]


def expected(step: Step, t: int, head: int, weight: torch.Tensor) -> torch.Tensor:
    cos, sin = step.cos_sin[step.positions[t]].double().chunk(2)
    return oracle.norm_rope(step.part(t, head), weight, step.norms.eps, cos, sin)


def stored(cache, name: str, slot: int) -> torch.Tensor:
    return cache.region(name)[slot // 128, :, slot % 128]


@pytest.mark.parametrize("qkv_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [HEADS, Heads(16, 1, 1, 128, 64), Heads(2, 2, 0, 64, 64)])
def test_queries_against_the_oracle(heads, qkv_dtype):
    step = Step(heads=heads, qkv_dtype=qkv_dtype)
    q, index_q = step.run()
    assert q.dtype == qkv_dtype and q.shape == (7, heads.q, heads.head_dim)
    ulp = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}[qkv_dtype]
    close = {"rtol": ulp, "atol": max(ulp * 1e-2, 1e-6)}  # a * cos - b * sin may cancel in fp32
    first = heads.q + 2 * heads.kv
    for t in range(7):
        for h in range(heads.q):
            want = expected(step, t, h, step.norms.q)
            torch.testing.assert_close(q[t, h].double(), want, **close)
        for h in range(heads.index):
            want = expected(step, t, first + h, step.norms.index_q)
            torch.testing.assert_close(index_q[t, h].double(), want, **close)
    if not heads.index:
        assert index_q is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", DTYPES)
def test_bytes_are_the_encoding_of_the_once_rounded_key(dtype, index_dtype):
    """The keys also go through the query path, which shows what was rounded before encoding."""
    heads = Heads(q=2, kv=2, index=1, head_dim=32, rotary_dim=16)
    step = Step(heads=heads, dtype=dtype, index_dtype=index_dtype)
    fused = step.qkv.view(7, 8, 32)  # q q k k v v index_q index_k
    fused[:, 0:2], fused[:, 6] = fused[:, 2:4].clone(), fused[:, 7].clone()
    step.norms = dataclasses.replace(step.norms, q=step.norms.k, index_q=step.norms.index_k)
    k, index_k = step.run()
    for t in range(7):
        for side, x in (("k", k[t]), ("v", fused[t, 4:6])):
            want = step.main.encode(side, x)
            for name, data in zip((f"{side}_data", f"{side}_scales"), want, strict=False):
                assert torch.equal(stored(step.main, name, int(step.main_slots[t])), data)
        want = step.index.encode("k", index_k[t])
        for name, data in zip(("k_data", "k_scales"), want, strict=False):
            assert torch.equal(stored(step.index, name, int(step.index_slots[t])), data)


def test_hand_computed_norm_and_rotation():
    heads = Heads(q=1, kv=1, index=0, head_dim=32, rotary_dim=2)
    step = Step(tokens=1, heads=heads, dtype="bf16", qkv_dtype=torch.float32)
    x = torch.zeros(3, 32)
    x[:, 0], x[:, 1], x[:, 2] = 3.0, 4.0, 12.0  # mean square 169 / 32
    step.qkv = x.view(1, -1)
    one = torch.zeros(32)
    one[1], one[2] = 1.0, -1.0
    step.norms = Norms(one, one, eps=1e-30)
    step.cos_sin = torch.tensor([[0.0, 1.0]])  # a quarter turn: (a, b) -> (-b, a)
    step.positions = torch.tensor([0])
    q, _ = step.run()
    unit = math.sqrt(32) / 13
    want = torch.zeros(32)
    want[0], want[1] = -2 * 4 * unit, 3 * unit
    torch.testing.assert_close(q[0, 0], want, rtol=1e-6, atol=0)
    assert stored(step.main, "v_data", int(step.main_slots[0])).view(torch.bfloat16)[0, 2] == 12.0


def test_dimensions_beyond_the_rotary_ones_are_only_normalised():
    step = Step(tokens=3)
    q, _ = step.run()
    step.cos_sin = torch.zeros_like(step.cos_sin)
    still, _ = step.run()
    assert torch.equal(q[..., 16:], still[..., 16:]) and (still[..., :16] == 0).all()


def test_slot_minus_one_writes_nothing_and_queries_still_come_out():
    step = Step()
    want = step.run()
    step.main.pages.fill_(0xAB)
    step.index.pages.fill_(0xCD)
    step.main_slots = torch.full((7,), -1)
    step.index_slots = torch.full((7,), -1)
    got = step.run()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert (step.main.pages == 0xAB).all() and (step.index.pages == 0xCD).all()


def test_main_and_index_slots_are_independent():
    step = Step(tokens=2)
    step.main_slots, step.index_slots = torch.tensor([5, -1]), torch.tensor([-1, 9])
    before = step.main.pages.clone(), step.index.pages.clone()
    step.run()
    for cache, old, slot in ((step.main, before[0], 5), (step.index, before[1], 9)):
        changed = (cache.pages != old).nonzero()
        assert (changed[:, 0] == 0).all()
        for region in cache.page.head_layout:
            row = region.nbytes // 128
            at = changed[:, 1] % cache.page.head_bytes
            inside = (at >= region.offset) & (at < region.end)
            assert ((at[inside] - region.offset) // row == slot).all()
        assert len(changed) > 0


def test_nothing_is_written_outside_the_pages():
    step = Step(dtype="bf16", index_dtype="fp8")
    step.run()
    for cache, poison in ((step.main, 0xFF), (step.index, 0x7F)):
        whole = torch.as_strided(cache.pages, (cache.pages.untyped_storage().nbytes(),), (1,), 0)
        rows = whole.view(4, -1)
        assert (rows[:, :32] == poison).all() and (rows[:, -32:] == poison).all()


def test_qkv_is_not_changed_and_may_be_strided():
    step = Step()
    want = step.run()
    bytes_want = step.main.pages.clone()
    wide = torch.full((7, step.qkv.shape[1] + 64), math.nan, dtype=torch.bfloat16)
    wide[:, 16:-48] = step.qkv
    before = wide.view(torch.int16).clone()
    step.qkv = wide[:, 16:-48]
    step.main.pages.fill_(0xFF)
    got = step.run()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert torch.equal(step.main.pages, bytes_want)
    assert torch.equal(wide.view(torch.int16), before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cache_never_holds_a_nan(bad, dtype):
    step = Step(tokens=3, dtype=dtype)
    step.qkv[1] = bad
    step.run()
    for side, cache in (("k", step.main), ("v", step.main), ("k", step.index)):
        slots = step.main_slots if cache is step.main else step.index_slots
        names = [n for n in (f"{side}_data", f"{side}_scales") if n in cache.page.head_layout]
        for slot in slots.tolist():
            x = cache.decode(side, *(stored(cache, n, slot).contiguous() for n in names))
            assert x.isfinite().all()


@pytest.mark.parametrize("qkv_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_for_any_batch_composition(dtype, qkv_dtype):
    """Queries and cache bytes: all at once, one by one, in chunks, reversed, two threads."""
    tokens, heads = 200, Heads(16, 1, 1, 128, 64)
    whole = Step(tokens, heads, dtype, qkv_dtype=qkv_dtype)
    q, index_q = whole.run()
    splits = {
        "one by one": [slice(t, t + 1) for t in range(tokens)],
        "chunks": [slice(s, s + 64) for s in range(0, tokens, 64)],
        "reversed": [torch.arange(tokens).flip(0)],
    }
    for parts in splits.values():
        other = Step(tokens, heads, dtype, qkv_dtype=qkv_dtype)
        for part in parts:
            got = other.run(part)
            assert torch.equal(got[0], q[part]) and torch.equal(got[1], index_q[part])
        assert torch.equal(other.main.pages, whole.main.pages)
        assert torch.equal(other.index.pages, whole.index.pages)
    torch.set_num_threads(2)
    try:
        other = Step(tokens, heads, dtype, qkv_dtype=qkv_dtype)
        assert torch.equal(other.run()[0], q)
        assert torch.equal(other.main.pages, whole.main.pages)
    finally:
        torch.set_num_threads(1)


def test_bitwise_for_any_share_of_the_heads():
    """Ranks hold some heads of one projection: each head's result is its own."""
    step = Step(heads=Heads(4, 2, 2, 32, 16))
    q, index_q = step.run()
    fused = step.qkv.view(7, 11, 32)
    rank = Step(heads=Heads(2, 1, 1, 32, 16))
    rank.qkv = fused[:, [2, 3, 5, 7, 9, 10]].reshape(7, -1)
    rank.positions, rank.main_slots = step.positions, step.main_slots
    rank.index_slots = step.index_slots
    got = rank.run()
    assert torch.equal(got[0], q[:, 2:]) and torch.equal(got[1], index_q[:, 1:])
    half = step.main.page.head_bytes
    assert torch.equal(rank.main.pages, step.main.pages[:, half:])
    assert torch.equal(rank.index.pages, step.index.pages)


def test_c14_no_tokens():
    step = Step(tokens=0)
    before = step.main.pages.clone()
    q, index_q = step.run()
    assert q.shape == (0, 4, 32) and index_q.shape == (0, 2, 32)
    assert torch.equal(step.main.pages, before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_dtypes(dtype):
    step, other = Step(), Step()
    for name in ("positions", "main_slots", "index_slots"):
        setattr(other, name, getattr(other, name).to(dtype))
    assert torch.equal(other.run()[0], step.run()[0])
    assert torch.equal(other.main.pages, step.main.pages)


def meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


STEP = Step()
DENSE = Step(heads=Heads(4, 2, 0, 32, 16))
N = STEP.norms
ONE_HEAD = MainCache.allocate(4, 1, "nvfp4", head_dim=32)
WIDE_INDEX = IndexCache.allocate(4, "nvfp4", head_dim=64)
SHORT, LONG = STEP.main_slots[:3], torch.arange(8)
TWICE = torch.tensor([1, 2, 3, 3, -1, -1, 4])
OUT_OF_CACHE = torch.tensor([512, 0, 1, 2, 3, 4, 5])
BAD = [
    ({"qkv": STEP.qkv[:, :-1]}, ValueError, r"qkv\.shape.*352.*351"),
    ({"qkv": STEP.qkv.double()}, TypeError, r"qkv\.dtype.*float64"),
    ({"qkv": None}, TypeError, "qkv.*torch.Tensor.*NoneType"),
    ({"heads": (4, 2, 2, 32, 16)}, TypeError, "heads.*a Heads.*tuple"),
    ({"norms": Norms(N.q[:16], N.k, N.index_q, N.index_k)}, ValueError, r"norms\.q\.shape.*32"),
    ({"norms": Norms(N.q, N.k.int(), N.index_q, N.index_k)}, TypeError, r"norms\.k\.dtype.*int32"),
    ({"norms": Norms(N.q, N.k, N.index_q)}, ValueError, r"norms\.index_k.*given.*None"),
    ({"norms": Norms(N.q, N.k, None, N.index_k)}, ValueError, r"norms\.index_q.*given.*None"),
    ({"norms": dataclasses.replace(N, eps=0.0)}, ValueError, r"norms\.eps.*> 0.*0\.0"),
    ({"norms": dataclasses.replace(N, eps=math.nan)}, ValueError, r"norms\.eps.*nan"),
    ({"cos_sin": STEP.cos_sin[:, :8]}, ValueError, r"cos_sin\.shape.*16.*8"),
    ({"cos_sin": STEP.cos_sin.int()}, TypeError, r"cos_sin\.dtype.*int32"),
    ({"cos_sin": meta(STEP.cos_sin)}, ValueError, r"cos_sin\.device.*cpu.*meta"),
    ({"positions": STEP.positions[:3]}, ValueError, r"positions\.shape.*\[7\].*\[3\]"),
    ({"positions": STEP.positions.float()}, TypeError, r"positions\.dtype.*float32"),
    ({"positions": STEP.positions + 300}, ValueError, r"positions.*0\.\.299 \(the RoPE table's"),
    ({"positions": STEP.positions - 300}, ValueError, r"positions.*0\.\.299.*-"),
    ({"main_cache": STEP.index}, TypeError, "main_cache.*MainCache.*IndexCache"),
    (
        {"main_cache": ONE_HEAD},
        ValueError,
        r"main_cache \(kv_heads, .*\(2, 32\).*\(1, 32\)",
    ),
    ({"index_cache": STEP.main}, TypeError, "index_cache.*IndexCache.*MainCache"),
    ({"index_cache": WIDE_INDEX}, ValueError, r"index_cache.*\(1, 32\).*\(1, 64\)"),
    ({"index_cache": None}, ValueError, "index_cache.*given.*None"),
    ({"index_slots": None}, ValueError, "index_slots.*given.*None"),
    *(
        ({name: value}, error, f"{name}.*{message}")
        for name in ("main_slots", "index_slots")
        for value, error, message in (
            (SHORT, ValueError, r"shape.*\[7\].*\[3\]"),
            (LONG, ValueError, r"shape.*\[7\].*\[8\]"),
            (LONG[:7, None], ValueError, r"shape.*\[7\].*\[7, 1\]"),
            (LONG[:7].float(), TypeError, r"dtype.*float32"),
            (meta(LONG[:7]), ValueError, r"device.*cpu.*meta"),
            (OUT_OF_CACHE, ValueError, r"-1 or 0\.\.511.*512"),
            (OUT_OF_CACHE - 514, ValueError, r"-1 or 0\.\.511.*-514"),
            (TWICE, ValueError, "distinct slots.*3 twice"),
        )
    ),
    ({"backend": "cpu"}, ValueError, "backend.*'cpu'"),
    ({"backend": "flydsl"}, NotImplementedError, "qkv_insert backend.*'flydsl'"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_written(change, error, message):
    good = Step().arguments()
    caches = [c for c in (change.get("main_cache", good["main_cache"]), good["index_cache"]) if c]
    before = [c.pages.clone() for c in caches]
    with pytest.raises(error, match=message):
        qkv_insert(**{**good, **change})
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.pages, old)


@pytest.mark.parametrize("name", ["index_cache", "index_slots", "norms"])
def test_a_dense_layer_refuses_parts_of_an_index_branch(name):
    given = {**DENSE.arguments(), name: STEP.arguments()[name]}
    with pytest.raises(ValueError, match=r"expected None \(heads.index is 0\)"):
        qkv_insert(**given)


@pytest.mark.parametrize(
    ("heads", "error", "message"),
    [
        ((0, 1, 1, 32, 16), ValueError, r"heads\.q.*>= 1.*0"),
        ((1, 0, 1, 32, 16), ValueError, r"heads\.kv.*>= 1.*0"),
        ((1, 1, -1, 32, 16), ValueError, r"heads\.index.*>= 0.*-1"),
        ((1, 1, 1, 32, 15), ValueError, r"heads\.rotary_dim.*even.*15"),
        ((1, 1, 1, 32, 34), ValueError, r"heads\.rotary_dim.*2\.\.32.*34"),
        ((1, 1, 1, 32.0, 16), TypeError, r"heads\.head_dim.*an int.*32\.0"),
    ],
)
def test_heads_are_checked(heads, error, message):
    with pytest.raises(error, match=message):
        Heads(*heads)


def test_padding_rows_with_stale_positions_change_nothing():
    """C14: the last rows are padding, slot -1, with any position of an earlier step."""
    step, padded = Step(tokens=5), Step(tokens=8)
    padded.qkv[:5], padded.positions[:5] = step.qkv, step.positions
    for name in ("main_slots", "index_slots"):
        slots = torch.cat([getattr(step, name), torch.full((3,), -1)])
        setattr(padded, name, slots)
    padded.positions[5:] = int32([116, 299, 0])
    got, want = padded.run(), step.run()
    assert torch.equal(got[0][:5], want[0]) and torch.equal(got[1][:5], want[1])
    assert torch.equal(padded.main.pages, step.main.pages)
    assert torch.equal(padded.index.pages, step.index.pages)

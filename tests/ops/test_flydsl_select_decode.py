"""select_decode in one launch, in the emulator: bit for bit what the two ops give one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gfx950_emu import Schedule
from rocm_msa.aot import ServingConfig
from rocm_msa.ops import block_topk, dispatch, select_decode
from rocm_msa.ops.index_score_decode import flydsl_gfx950 as score_module
from rocm_msa.ops.index_select_decode import flydsl_gfx950 as module
from rocm_msa.ops.index_select_decode.flydsl_gfx950 import Build
from rocm_msa.ops.rows import decode_rows
from tests.launcher.emulated import SCHEDULES, assert_clean, emulated, resources
from tests.ops.cases import DTYPES, Batch, int32, make_batch, queries

SLOW = pytest.mark.slow
DIM, BLOCK = 128, 128


class Call:
    """Decode rows over index pages; wide: blocks of the table, the same pages again and again."""

    def __init__(self, lens, rows=1, heads=1, dtype="nvfp4", wide=0, seed=0, **kept):
        self.batch: Batch = make_batch(
            [min(n, 300) for n in lens] if wide else lens,
            index_dtype=dtype, dtype="bf16", head_dim=DIM, kv_heads=1, seed=seed,
        )  # fmt: skip
        self.table, self.lens, self.rows = self.batch.table, int32(lens), rows
        if wide:  # rows with other pages in other places
            first = self.table[:, :3].clamp(min=0)
            some = torch.Generator().manual_seed(seed)
            order = torch.randint(0, first.shape[1], (wide,), generator=some)
            self.table = first[:, order].contiguous()
        self.q = queries(seed + 5, len(lens) * rows, heads, DIM)
        self.kept = {"topk": 16, "init_blocks": 0, "local_blocks": 1} | kept
        self.counters = torch.zeros(len(lens) + 2, dtype=torch.int32)

    @property
    def num_blocks(self) -> torch.Tensor:
        return decode_rows(self.lens, self.rows).num_blocks.int()

    @property
    def arguments(self) -> tuple:
        return self.q, self.batch.index, self.table, self.lens, self.rows

    def run(self, schedule: Schedule | None = None, **options):
        """(ids, report); no finding, counters back at zero."""
        builds = module.needs(*self.arguments, self.kept["topk"])
        with emulated(builds, schedule=schedule) as reports:
            ids = select_decode(
                *self.arguments, self.num_blocks, **self.kept, counters=self.counters, **options
            )
        assert_clean(reports, launches=1)
        assert not self.counters.any()
        return ids, reports[0]

    def expected(self) -> torch.Tensor:
        with emulated(score_module.needs(*self.arguments)):
            scores = score_module.run(*self.arguments)
        return block_topk(scores, self.num_blocks, **self.kept, backend="reference")


def check(call: Call, **options):
    ids, report = call.run(**options)
    assert torch.equal(ids, call.expected())
    return report


@pytest.mark.parametrize(
    ("dtype", "schedules"),
    [
        ("nvfp4", SCHEDULES),
        *((dtype, SCHEDULES[::6]) for dtype in DTYPES[1:]),
        *(pytest.param(dtype, SCHEDULES, marks=SLOW) for dtype in DTYPES[1:]),
    ],
)
def test_every_schedule(dtype, schedules):
    call = Call([1500, 0, 3000], 2, 2, dtype, wide=24, topk=5)  # lists longer and shorter than 5
    want = call.expected()
    for schedule in schedules:
        assert torch.equal(call.run(schedule)[0], want), schedule


@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (4, 1), (1, 4), (2, 2), (3, 1)])
def test_rows_and_heads(rows, heads):
    check(Call([2600, rows, 700], rows, heads, wide=21, seed=rows))


@pytest.mark.parametrize("length", [0, 1, 128, 129, 513, 2049])
def test_lengths(length):
    check(Call([length, 3], wide=17))


KEPT = [
    {"topk": 1},
    {"topk": 3, "init_blocks": 2},
    {"topk": 16, "local_blocks": 3},
    {"topk": 4, "init_blocks": 1, "local_blocks": 3},
    {"topk": 64},
    {"topk": 40},
]


@pytest.mark.parametrize("kept", KEPT)
def test_kept_blocks(kept):
    check(Call([128 * 90 + 5, 300], 2, wide=91, **kept))


def test_ties_go_to_the_lower_id():
    """All blocks in three pages: whole classes of equal scores, across lists."""
    call = Call([128 * 200], 1, wide=200)
    ids, _ = call.run()
    assert torch.equal(ids, call.expected())
    assert (ids[0, 0, 2:].diff() > 0).all()


def test_nan_scores_and_entries_that_name_no_page():
    call = Call([128 * 30, 128 * 30], 2, wide=30, dtype="bf16")
    call.table[0, 3:9], call.table[1, 4] = -1, call.batch.index.num_blocks
    call.q[1, 0, 7] = float("nan")
    check(call)


def test_long_context_and_many_requests():
    check(Call([8192 * BLOCK - 5], wide=8192, topk=16))
    check(Call([(137 * i) % 3000 for i in range(64)], 2, wide=24))


def test_counters_serve_one_call_after_another():
    """As replays of a graph do: the same buffers, other values."""
    call = Call([2000, 900], 2, wide=16)
    for seed in range(3):
        call.q = queries(seed, 4, 1, DIM)
        check(call)


def test_one_launch_only_where_it_serves():
    """Without counters, beyond 4 pairs or without the kernel: the two ops, and the reason said."""
    call = Call([600, 80], 1, wide=6)
    want = call.expected()
    before = dispatch.taken["index_select_decode", "flydsl"]
    arguments = (*call.arguments, call.num_blocks)
    assert torch.equal(call.run()[0], want)
    assert dispatch.taken["index_select_decode", "flydsl"] == before + 1
    with emulated(module.needs(*call.arguments, 16)) as reports:
        select_decode(*arguments)  # on the CPU: the reference of both
        select_decode(*arguments, counters=call.counters, backend="reference")
    with emulated([]) as others:
        select_decode(*arguments, counters=call.counters)
    assert not reports and not others
    assert dispatch.taken["index_select_decode", "flydsl"] == before + 1
    with pytest.raises(NotImplementedError, match=r"heads on flydsl.*<= 4.*got 5"):
        module.needs(queries(1, 5, 1, DIM), call.batch.index, call.table[:1], call.lens, 5, 16)
    with pytest.raises(NotImplementedError, match=r"topk on flydsl.*<= 64.*got 65"):
        module.needs(*call.arguments, 65)


def test_bad_arguments_name_themselves():
    call = Call([600, 80], 1, wide=6)
    for change, error, match in (
        ({"counters": torch.zeros(1, dtype=torch.int32)}, ValueError, "counters.*>= 2"),
        ({"counters": torch.zeros(2)}, TypeError, "counters"),
        ({"counters": call.counters, "topk": 0}, ValueError, "topk"),
        ({"counters": call.counters, "local_blocks": 0}, ValueError, "local_blocks"),
    ):
        with pytest.raises(error, match=match):
            select_decode(*call.arguments, call.num_blocks, **change)


def test_builds():
    config = ServingConfig(16, 1, 1, DIM, 64, "nvfp4", "nvfp4")
    call = Call([300])
    assert module.builds(config) == module.needs(*call.arguments, 16)
    assert not module.builds(replace(config, head_dim=64))
    assert not module.builds(replace(config, index_heads=5))
    good = Build("fp8", "bf16", 16)
    for field, value in (("kind", "x"), ("query", "fp32"), ("kept", 65)):
        with pytest.raises(ValueError, match=r"dtype|query|kept"):
            replace(good, **{field: value})


@pytest.mark.parametrize("dtype", DTYPES)
def test_resources(dtype):
    used = resources(Build(dtype, "bf16", 16))
    assert used["scratch_bytes"] == used["vgpr_spills"] == used["sgpr_spills"] == 0

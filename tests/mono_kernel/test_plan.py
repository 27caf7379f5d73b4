"""Shapes and plan of the mono kernel: every task once, no byte written twice, every wait fed."""

import dataclasses
import itertools
from collections import Counter

import pytest

from mono_kernel import plan
from mono_kernel.layer_gfx950 import Build
from mono_kernel.shapes import MAX_ROWS, Formats, Shape, kv_head_of
from rocm_msa.arch import GFX950
from rocm_msa.capacity import MINIMAX_M3
from rocm_msa.errors import ConfigError
from tests.mono_kernel.cases import small_shape

SHAPES = {
    "small": small_shape(),
    "small_tp4": small_shape(4),
    **{f"m3_tp{tp}": Shape.of(MINIMAX_M3, tp) for tp in (1, 2, 4, 8)},
}


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_ranks_share_of_m3(tp):
    shape = Shape.of(MINIMAX_M3, tp)
    assert shape.q_heads == 64 // tp and shape.kv_heads == max(1, 4 // tp)
    assert shape.index_heads == shape.kv_heads and shape.group == 64 // tp // shape.kv_heads
    assert shape.intermediate == shape.shared == 3072 // tp and shape.slots == 5
    assert shape.features == 128 * (64 // tp + 3 * max(1, 4 // tp) + 1)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_kv_head_has_a_rank_and_replicas_are_neighbours(tp):
    held = [list(kv_head_of(rank, tp, 4)) for rank in range(tp)]
    assert all(len(heads) == max(1, 4 // tp) for heads in held)
    counts = Counter(head for heads in held for head in heads)
    assert counts == {head: max(1, tp // 4) for head in range(4)}
    assert [h for heads in held for h in heads] == sorted(h for heads in held for h in heads)


def test_query_heads_lie_on_a_rank_that_holds_their_kv_head():
    for tp in (1, 2, 4, 8):
        for rank in range(tp):
            queries = range(rank * 64 // tp, (rank + 1) * 64 // tp)
            assert {q // 16 for q in queries} == set(kv_head_of(rank, tp, 4))


def test_refusals_come_all_at_once():
    wrong = {"hidden": 500, "tp": 3, "topk": 8, "attention_format": "int8", "experts": 1000}
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(small_shape(), **wrong)
    assert {reason.split(":")[0] for reason in error.value.reasons} >= set(wrong)
    with pytest.raises(ConfigError, match="head_dim: expected 128, got 64"):
        Shape.of(dataclasses.replace(MINIMAX_M3, head_dim=64, index_dim=64), 4)


def test_names_differ_when_a_field_does():
    shape = small_shape()
    names = {shape.name, small_shape(2).name, small_shape(formats=Formats("bf16")).name}
    names |= {dataclasses.replace(shape, eps=1e-5).name}
    assert len(names) == 4 and all(name.isidentifier() for name in names)
    builds = {Build.from_shape(shape).symbol, Build.from_shape(shape, 3).symbol}
    assert len(builds) == 2 and all(symbol.isidentifier() for symbol in builds)


# Tasks


@pytest.mark.parametrize("workgroups", [1, 2, 8, 256])
@pytest.mark.parametrize("count", [0, 1, 7, 256, 385])
def test_every_task_is_done_once(workgroups, count):
    done = Counter(t for w in range(workgroups) for t in plan.share(count, w, workgroups))
    assert done == dict.fromkeys(range(count), 1)


@pytest.mark.parametrize("workgroups", [1, 4, 256])
@pytest.mark.parametrize("blocks", [0, 1, 5, 1025])
def test_every_block_of_a_request_is_scored_once(workgroups, blocks):
    for request in (0, 1, 5, 15):
        done = Counter(
            block
            for w in range(workgroups)
            for wave in range(plan.WAVES)
            for block in plan.score_blocks(request, blocks, w, wave, workgroups)
        )
        assert done == dict.fromkeys(range(blocks), 1)


def test_requests_start_at_different_workgroups():
    first = {w for r in range(16) for w in range(256) if 0 in plan.score_blocks(r, 1, w, 0, 256)}
    assert len(first) == 16


def test_expert_tasks_cover_each_tile_of_each_expert_in_use_once(shape):
    last = shape.experts - 1
    experts = plan.expert_list([[0, last], [last, -1], [2, 0]])
    assert experts == [0, 2, last]
    tasks = list(plan.up_tasks(shape, experts))
    assert len(tasks) == len(set(tasks))
    routed, shared = shape.intermediate // 16, shape.shared // 16
    want = dict.fromkeys(experts, routed) | ({shape.experts: shared} if shared else {})
    assert Counter(e for e, _ in tasks) == want


@pytest.mark.parametrize(("rows", "per"), [(1, 1), (2, 1), (2, 2), (3, 1), (16, 1)])
def test_who_does_it_in_place(shape, rows, per):
    found = plan.in_place(shape, rows, per)
    assert found == {
        "norm": rows <= 2, "join": rows * shape.kv_heads <= 2, "insert": per == 1
    }  # fmt: skip
    # The operands of those rows fit.
    few = plan.FEW * (2 * max(shape.hidden, shape.attended) + 4)
    assert plan.lds_layout(shape)["rows"].nbytes >= few


# Regions


@pytest.mark.parametrize("rows", [1, 3, 4, 16])
def test_no_byte_is_written_twice_and_all_of_it_lies_in_its_region(shape, rows):
    layout = plan.scratch_layout(shape, 64)
    sizes = {region.name: region.nbytes for region in layout}
    sizes |= dict.fromkeys(plan.OUTPUTS, 2 * MAX_ROWS * shape.hidden)
    for phase in plan.PHASES:
        if phase.count is None:
            continue
        runs = {}
        for task in range(phase.count(shape, rows)):
            for region, first, size in plan.writes(shape, phase.name, task, rows):
                runs.setdefault(region, []).append((first, first + size))
        caches = ("main_cache", "index_cache")
        assert set(runs) == {name for name in phase.writes if name not in caches}
        for region, found in runs.items():
            found.sort()
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(found)), region
            assert found[0][0] >= 0 and found[-1][1] <= sizes[region], region


def test_whole_rows_are_written(shape):
    """Of the regions that later phases read whole: no gap."""
    rows = 5
    for name, region, width in (
        ("project", "projected", 2 * shape.features),
        ("insert", "q", 2 * shape.attended),
        ("join", "attended", 2 * shape.attended),
        ("output", "residual_out", 2 * shape.hidden),
        ("route", "logits", 4 * shape.experts),
        ("down", "hidden_out", 2 * shape.hidden),
    ):
        phase = plan.PHASES[plan.PHASE_NAMES.index(name)]
        written = sum(
            size
            for task in range(phase.count(shape, rows))
            for where, _, size in plan.writes(shape, name, task, rows)
            if where == region
        )
        assert written == rows * width, (name, region)


def test_expert_activations_are_written_once(shape):
    runs = []
    for row in range(MAX_ROWS):
        for slot in range(shape.slots):
            width = shape.shared if slot == shape.chosen else shape.intermediate
            for tile in range(width // 16):
                runs += [(a, a + n) for _, a, n in plan.up_writes(shape, tile, row, slot)]
    runs.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(runs))
    assert runs[-1][1] <= plan.scratch_layout(shape, 1)["active"].nbytes


def test_every_read_has_a_producer_in_an_earlier_phase():
    known = set(plan.INPUTS)
    for phase in plan.PHASES:
        assert set(phase.reads) <= known, phase.name
        # What a phase writes is read after the next meeting of the grid only.
        assert not (set(phase.writes) & set(phase.reads)), phase.name
        known |= set(phase.writes)
    assert set(plan.OUTPUTS) <= known


def test_every_region_has_one_phase_that_writes_it_and_one_that_reads_it():
    writers = Counter(name for phase in plan.PHASES for name in phase.writes)
    assert set(writers.values()) == {1}
    layout = {region.name for region in plan.scratch_layout(small_shape(), 8)}
    assert layout == set(writers) - {"main_cache", "index_cache", *plan.OUTPUTS}
    read = {name for phase in plan.PHASES for name in phase.reads}
    # Read by tests and counters alone; by the workgroup that wrote it.
    own = {"own_q", "all_q"}
    assert layout - read == {"index_q", "selected", "chosen", "chosen_weights", *own}


def test_workgroups_fit_their_compute_unit(shape):
    layout = plan.lds_layout(shape)
    assert layout.nbytes <= GFX950.lds_bytes_per_cu
    assert layout["table"].offset == 0


def test_mailboxes_hold_a_word_for_every_output_of_every_rank(shape):
    layout = plan.mailbox_layout(shape)
    assert layout["errors"].offset == 0 and layout["errors"].nbytes == 8 * shape.tp
    for site in plan.SITES:
        assert layout[site].nbytes == shape.tp * shape.hidden * MAX_ROWS * plan.WORD_BYTES


def test_offsets_do_not_depend_on_the_batch(shape):
    one, many = plan.scratch_layout(shape, 1), plan.scratch_layout(shape, 8192)
    assert [r.offset for r in one] == [r.offset for r in many]


def test_the_grid_is_resident():
    assert [plan.grid(n) for n in (1, 255, 256, 304)] == [1, 255, 256, 256]
    plan.check_workgroups(256, 256)
    with pytest.raises(ValueError, match="workgroups: expected <= 128, all resident"):
        plan.check_workgroups(256, 128)
    flags = plan.state_layout()["flags"]
    assert flags.nbytes == 8 * (len(plan.PHASES) - 1) * plan.MAX_WORKGROUPS

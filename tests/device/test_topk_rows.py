"""The best pairs of a wave by networks in rows, against sorting in Python."""

from __future__ import annotations

import flydsl.expr as fx
import pytest
import torch

from rocm_msa.device import topk_rows, wave
from tests.device.harness import run

UNSIGNED = 1 << 32


def body(registers: int, ordered: bool = False):
    def traced(keys, ids, out):
        lane = wave.lane_id()
        places = [lane * 4 + 256 * r for r in range(registers)]
        pairs = [(keys.load(fx.Uint32, offset=at), ids.load(fx.Int32, offset=at)) for at in places]
        lists = topk_rows.lists if ordered else topk_rows.sorted_rows
        found = lists(*zip(*pairs, strict=True))
        key, one = topk_rows.best_of_rows(topk_rows.merge_all(found))
        out.store(key, offset=lane * 4)
        out.store(one, offset=lane * 4 + 256)

    return traced


def wanted(keys: torch.Tensor, ids: torch.Tensor) -> list[tuple[int, int]]:
    both = zip(keys.flatten().tolist(), ids.flatten().tolist(), strict=True)
    pairs = [(k % UNSIGNED, i) for k, i in both]
    best = sorted((-k, i) for k, i in pairs if k)[:16]
    return ([(-k, i) for k, i in best] + [(0, -1)] * 16)[:16]


def check(keys: torch.Tensor, ids: torch.Tensor, ordered: bool = False) -> None:
    out = torch.zeros(2, 64, dtype=torch.int32)
    run(body(len(keys), ordered), [keys, ids, out])
    for row in range(4):
        part = out[:, 16 * row : 16 * row + 16].tolist()
        assert [(k % UNSIGNED, i) for k, i in zip(*part, strict=True)] == wanted(keys, ids), row


def random_keys(seed: int, registers: int, low: int, high: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (registers, 64), generator=generator, dtype=torch.int32)


def distinct_ids(seed: int, registers: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(registers * 64, generator=generator).int().view(registers, 64)


@pytest.mark.parametrize("registers", [1, 3])
@pytest.mark.parametrize(
    "low, high", [(-(2**31), 2**31 - 1), (1, 4), (0, 2), (0, 1)], ids=["any", "ties", "few", "none"]
)
def test_best_of_all(low, high, registers):
    check(random_keys(low & 7, registers, low, high), distinct_ids(3, registers))


def test_sorted_either_way_and_one_that_is_there():
    keys = torch.arange(64, dtype=torch.int32)[None] + 1
    ids = torch.arange(64, dtype=torch.int32)[None]
    for order in (keys, keys.flip(1), torch.where(keys == 38, keys, 0)):
        check(order.contiguous(), ids)


def test_lists_that_are_in_order_already():
    """As ranks send them: each row in rank order, ids -1 where nothing is left."""
    keys, ids = random_keys(5, 2, 1, 40).view(8, 16), distinct_ids(6, 2).view(8, 16)
    for row, (k, i) in enumerate(zip(keys, ids, strict=True)):
        pairs = sorted(zip((-k).tolist(), i.tolist(), strict=True))
        k.copy_(torch.tensor([-a for a, _ in pairs]))
        i.copy_(torch.tensor([b for _, b in pairs]))
        k[16 - row :], i[16 - row :] = 0, -1
    check(keys.view(2, 64), ids.view(2, 64), ordered=True)

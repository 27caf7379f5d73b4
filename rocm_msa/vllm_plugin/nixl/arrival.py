"""What happens to rows between their arrival and their use: checks (debug mode), conversion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rocm_msa.cache.convert import from_vllm, to_vllm
from rocm_msa.cache.outer_block import INDEX, OuterBlockRow
from rocm_msa.vllm_plugin.nixl import agent as nixl
from rocm_msa.vllm_plugin.nixl.agent import Read, RowAgent
from rocm_msa.vllm_plugin.nixl.checks import checksums, compare, runs_of
from rocm_msa.vllm_plugin.nixl.memory import Rows
from rocm_msa.vllm_plugin.nixl.peers import Peer
from rocm_msa.vllm_plugin.nixl.plan import Piece


@dataclass
class TableRead:
    """A read of a prefill rank's table rows into our own memory int64 `[blocks, columns]`."""

    rank: int
    inbox: torch.Tensor
    registration: Any
    read: Read


def convert(rows: Rows, blocks: Sequence[int], packing: str, wanted: str) -> None:
    """Permute the NVFP4 main and draft pages of `blocks` from `packing` to `wanted`, in place."""
    if packing == wanted:
        return
    ids = torch.as_tensor(blocks, device=rows.bytes.device)
    for page in rows.row.pages:
        if page.kind == INDEX:
            continue  # one key head: the same bytes in every packing
        span = slice(page.offset, page.offset + page.page.page_bytes)
        pages = rows.bytes[ids, span]
        if packing != "rocm_msa":
            pages = from_vllm(pages, page.page, _order(packing))
        if wanted != "rocm_msa":
            pages = to_vllm(pages, page.page, _order(wanted))
        rows.bytes[ids, span] = pages


def _order(packing: str) -> str:
    return {"vllm-hnd": "HND", "vllm-nhd": "NHD"}[packing]


def post_tables(
    agent: RowAgent, peer: Peer, blocks: Sequence[int], local_device: int, on: torch.device
) -> list[TableRead]:
    """Read the table rows of remote `blocks` from every prefill rank that delivered bytes."""
    out = []
    width = 1 + len(runs_of(peer.row))
    for rank in peer.plan.pieces:
        table = peer.tables[rank]
        inbox = torch.zeros(len(blocks), width, dtype=torch.int64, device=on)
        nbytes = width * 8
        registration = agent.register(inbox.data_ptr(), inbox.numel() * 8, local_device)
        lengths = np.full(len(blocks), nbytes, dtype=np.uint64)
        local = np.arange(len(blocks), dtype=np.uint64) * np.uint64(nbytes)
        remote = np.asarray(blocks, dtype=np.uint64) * np.uint64(table.stride)
        local += np.uint64(inbox.data_ptr())
        remote += np.uint64(table.base)
        try:
            read = agent.read(
                peer.names[rank],
                np.stack([local, lengths], axis=1),
                np.stack([remote, lengths], axis=1),
                local_device,
                table.device,
            )
        except Exception:
            agent.deregister(registration)
            release_tables(agent, out)
            raise
        out.append(TableRead(rank, inbox, registration, read))
    return out


def release_tables(agent: RowAgent, tables: list[TableRead]) -> bool:
    """Free finished or cancelled table reads; False while one cannot be cancelled."""
    for table in list(tables):
        if not agent.release(table.read):
            return False
        agent.deregister(table.registration)
        tables.remove(table)
    return True


def tables_state(agent: RowAgent, tables: list[TableRead]) -> str:
    states = {agent.state(table.read) for table in tables}
    if nixl.FAILED in states:
        return nixl.FAILED
    return nixl.DONE if states == {nixl.DONE} else nixl.BUSY


def unpublished(tables: list[TableRead]) -> bool:
    """Whether a prefill rank had not published a block yet (or not any more)."""
    return any(bool((table.inbox[:, 0] == 0).any()) for table in tables)


def verify(
    rows: Rows,
    blocks: Sequence[int],
    identities: Sequence[int],
    peer: Peer,
    tables: list[TableRead],
) -> str | None:
    """The first difference between what was declared and what arrived; None when all is well."""
    arrived = checksums(rows.bytes, blocks, rows.row)
    for table in tables:
        columns = matching_runs(rows.row, peer.row, peer.plan.pieces[table.rank])
        problem = compare(identities, arrived, table.inbox, columns)
        if problem:
            return f"prefill rank {table.rank}: {problem}"
    return None


def matching_runs(
    local: OuterBlockRow, remote: OuterBlockRow, pieces: Sequence[Piece]
) -> list[tuple[int, int]]:
    """(local run, remote run) pairs whose bytes these pieces carry."""
    remote_runs = {offset: i for i, (_, _, offset, _) in enumerate(runs_of(remote))}
    pairs = []
    for i, (_, _, offset, nbytes) in enumerate(runs_of(local)):
        for piece in pieces:
            start = offset - piece.local_offset
            if start >= 0 and start + nbytes <= piece.nbytes:
                pairs.append((i, remote_runs[piece.remote_offset + start]))
    return pairs

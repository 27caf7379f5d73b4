"""Traced code of the exchange on gfx950; README.md is the protocol, phase by phase.

Scoring is dealt to the workgroups in equal parts, all else to the waves of the launch, one
(row, head) at a time. A wave that gives up goes on to the end without sending or selecting
anything.
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from dcp.exchange_begin_kernel import all_here, first_query, push, scrub, survey
from dcp.exchange_gfx950 import MAX_REQUESTS, Build
from dcp.exchange_places_kernel import THREADS, buffer_at, places
from dcp.exchange_score_kernel import ask_for_first, first_page, score, send_candidates
from dcp.exchange_select_kernel import select
from dcp.mailbox_layout import WORD
from dcp.plan import Results
from dcp.shard import Shard
from rocm_msa.device import mailbox
from rocm_msa.device.memory import global_address, global_bytes, lds_regions
from rocm_msa.device.nvfp4 import TABLE_BYTES, copy_table
from rocm_msa.device.wave import WAVE, Scalars
from rocm_msa.flydsl_compile import Compiled, compile_kernel
from rocm_msa.ops.flydsl_index_score import Keys


def _phases(a: SimpleNamespace, cache: SimpleNamespace) -> None:
    """A launch, as README.md numbers it.

    Args:
        a: the kernel's arguments by name, but for those of `cache`: what scoring a block needs.
    """
    table_bytes = TABLE_BYTES if a.build.kind == "nvfp4" else 0
    table, prefix = lds_regions(table_bytes, 4 * (MAX_REQUESTS + WAVE))
    a.own = mailbox.own_mailbox(a.addresses, a.rank)
    a.state = Scalars({"state": a.state}).state
    # What does not depend on each other is asked for before any of it is waited for.
    launch = mailbox.generation_word(a.state, a.places.generation)
    errors, word = mailbox.error_words(a), first_query(Scalars(vars(a)))
    a.total, mark = survey(Scalars(vars(a)), prefix)
    launch = mailbox.in_scalars(launch)
    a.tag, a.buffer = mailbox.tag_of(launch), buffer_at(a, launch)
    a.digest = a.digest ^ mark
    if table is not None:
        copy_table(global_bytes(cache.table), table, fx.thread_idx.x, THREADS)
    # Writers: all waves (table), wave 0 (prefix). Readers: all waves.
    fx.barrier()
    a = Scalars(vars(a))
    number = first_page(a, cache, prefix)
    _begin(a, launch, errors, word)
    keys = Keys(a.build.kind, table)
    held = ask_for_first(a, cache, keys, number)
    ok = all_here(a)
    ok = score(a, cache, keys, prefix, number, held, ok)
    if not a.sends_scores:
        flags = global_address(a.state).at(a.places.flags)
        mailbox.raise_flag(a, flags.at(fx.block_idx.x * WORD))
        ok = send_candidates(a, prefix, ok)
    select(a, ok)
    mailbox.arrive(a, a.workgroups)


@flyc.jit
def _begin(a, launch, errors, word):
    """Say hello and push, unless this rank or a peer has had an error."""
    if mailbox.hear(a, errors) == False:  # noqa: E712
        push(a, word)
        scrub(a, launch)


def compile_build(build: Build) -> Compiled:
    shared = {
        "build": build,
        "shard": Shard(0, build.ranks, build.heads),
        "ranks": build.ranks,
        "places": places(build),
        "sends_scores": build.results == Results.SCORES.value,
    }

    @flyc.kernel(name=build.symbol)
    def kernel(
        index_q: fx.Pointer,  # [rows, own heads, 128]
        q_row: fx.Int32,  # bytes
        q_head: fx.Int32,
        pages: fx.Pointer,  # [num_pages, page bytes]
        block_stride: fx.Int64,  # bytes
        num_pages: fx.Int32,
        table: fx.Pointer,  # the NVFP4 table, 2048 bytes
        factor: fx.Float32,  # undoes the scale of the keys
        block_table: fx.Pointer,  # int32 [requests, max_blocks]
        table_row: fx.Int32,  # elements
        num_blocks: fx.Pointer,  # int32 [rows]
        requests: fx.Int32,
        rows_per_request: fx.Int32,
        max_blocks: fx.Int32,
        init_blocks: fx.Int32,
        local_blocks: fx.Int32,
        digest: fx.Int32,
        addresses: fx.Pointer,  # int64 [ranks + 1], see device/mailbox.py
        rank: fx.Int32,
        state: fx.Pointer,  # Geometry.state
        patience: fx.Int32,  # milliseconds
        max_rows: fx.Int32,  # Geometry.rows, slots, result_words, scrub_chunks
        slots: fx.Int32,
        result_words: fx.Int32,
        chunks: fx.Int32,
        workgroups: fx.Int32,
        out: fx.Pointer,  # int32 [own heads, rows, topk]
    ):
        cache = SimpleNamespace(
            pages=pages, block_stride=block_stride, num_pages=num_pages, table=table,
            factor=factor, block_table=block_table, table_row=table_row, table_column=1,
        )  # fmt: skip
        a = SimpleNamespace(
            index_q=index_q, q_row=q_row, q_head=q_head, num_blocks=num_blocks,
            requests=requests, rows_per_request=rows_per_request, max_blocks=max_blocks,
            init_blocks=init_blocks, local_blocks=local_blocks, digest=digest,
            addresses=addresses, rank=rank, state=state, patience=patience, max_rows=max_rows,
            slots=slots, result_words=result_words, chunks=chunks, workgroups=workgroups,
            out=out, **shared,
        )  # fmt: skip
        _phases(a, cache)

    return compile_kernel(kernel, THREADS, pointers={"out": fx.Int32}, hints={"waves_per_eu": 2})

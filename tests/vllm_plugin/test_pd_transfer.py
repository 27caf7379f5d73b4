"""Rows over real NIXL agents in one process: bytes, descriptors, faults, checks, conversion."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
import torch

from rocm_msa.cache.convert import to_vllm
from rocm_msa.vllm_plugin.nixl.checks import identities
from rocm_msa.vllm_plugin.nixl.control import ControlError
from rocm_msa.vllm_plugin.nixl.leases import LeaseTable
from tests.vllm_plugin.pd_ranks import BLOCKS, PATIENCE, Clock, only, sides

pytest.importorskip("nixl", reason="NIXL is not installed")

HERE, THERE = [5, 6, 7, 20, 21, 40], [1, 2, 3, 9, 10, 30]


def arrived(source, target, here=HERE, there=THERE) -> bool:
    """Whether every rank holds its share of the source's blocks."""
    return all(
        torch.equal(rank.rows.bytes[here], target.share(source.whole, i)[there])
        for i, rank in enumerate(target.ranks)
    )


def counts(side, rank=0):
    return side.ranks[rank].counts.data


@pytest.mark.parametrize(("main", "index"), [("nvfp4", "fp8"), ("fp8", "fp8"), ("bf16", "nvfp4")])
def test_equal_tp_is_one_descriptor_a_run_of_blocks(main, index):
    dtypes = {"main": main, "index": index}
    with sides(dtypes, dtypes) as (source, target):
        before = target.ranks[0].rows.bytes.clone()
        source.leases.hold("a")
        target.load(source, "a", HERE, THERE)
        assert only(target.run()) == ({"a"}, set())
        assert arrived(source, target)
        others = [b for b in range(BLOCKS) if b not in HERE]
        assert torch.equal(target.ranks[0].rows.bytes[others], before[others])
        read = counts(target)
        # 3 runs of adjacent blocks, counted by NIXL itself; 9 pages a row here.
        assert read["descriptors"] == [3]
        assert read["blocks"] == [6]
        assert read["nbytes"] == [6 * target.ranks[0].rows.row.nbytes]
        assert source.leases.take_released().done == {"a"}


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(1, 2), (1, 4), (2, 1), (4, 2), (2, 4), (8, 2), (2, 8), (8, 4), (4, 8), (2, 2)],
)
def test_unequal_tp(prefill, decode, caplog):
    caplog.set_level("INFO", "vllm.rocm_msa.nixl")
    with sides({"tp": prefill}, {"tp": decode}) as (source, target):
        source.leases.hold("a")
        target.load(source, "a", HERE, THERE)
        assert target.run() == [({"a"}, set())] * decode
        assert arrived(source, target)
        assert source.leases.take_released().done == {"a"}
        whole = {prefill, decode} in ({4, 8}, {prefill})
        reason = f"prefill {prefill}, decode {decode}"
        assert (reason in caplog.text) != whole
        if whole:
            assert all(counts(target, r)["descriptors"] == [3] for r in range(decode))


def test_many_loads_at_once():
    with sides() as (source, target):
        for i in range(40):
            source.leases.hold(f"r{i}")
            target.load(source, f"r{i}", [i], [(7 * i) % BLOCKS])
        finished, failed = only(target.run())
        assert len(finished) == 40 and not failed
        assert arrived(source, target, list(range(40)), [(7 * i) % BLOCKS for i in range(40)])
        assert len(source.leases.take_released().done) == 40


@contextlib.contextmanager
def silent_port(listens=True):
    """A port that is taken and where nobody answers, or where nobody listens."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        if listens:
            nobody.listen(100)
        yield nobody.getsockname()[1]


def test_no_answer_is_a_failure_after_one_retry():
    with sides({}, {"control_timeout_seconds": 0.3}) as (source, target), silent_port() as port:
        source.port = port
        target.load(source, "a", HERE, THERE)
        assert only(target.run()) == (set(), {"a"})
        assert counts(target)["retries"] == 1
        assert counts(target)["failed_handshake"] == 1


def test_an_engine_that_is_gone_is_no_wait():
    """A refused connection fails a load that would have waited for minutes; a gone one as well."""
    with sides() as (source, target), silent_port(listens=False) as port:
        source.leases.hold("a")
        target.load(source, "a", [1], [1])
        assert only(target.run()) == ({"a"}, set())
        source.server.close()
        for gone in (source.port, port):
            client = target.ranks[0].client
            answer = client.ask("127.0.0.1", gone, source.engine, "renew", requests=[])
            assert "nobody listens" in str(answer.exception(timeout=PATIENCE / 2))


def test_courtesies_to_a_silent_engine_do_not_hold_up_others():
    """After one silence, and until a timeout has passed, they are not sent at all."""
    with sides() as (source, target), silent_port() as silent:
        client = target.ranks[0].client

        def ask(port, courtesy):
            return client.ask(
                "127.0.0.1", port, source.engine, "renew", courtesy=courtesy, requests=[]
            )

        client.timeout = 0.2
        with pytest.raises(ControlError, match="no answer"):
            ask(silent, False).result()
        lost = [ask(silent, True) for _ in range(100)]
        assert all("has been silent, not asked" in str(f.exception()) for f in lost)
        target.clock.advance(0.3)
        assert "no answer" in str(ask(silent, True).exception())
        client.timeout = PATIENCE
        lost = [ask(silent, True) for _ in range(100)]
        assert ask(source.port, False).result() == {"held": {}}
        assert all("has been silent, not asked" in str(f.exception()) for f in lost)


def test_prefill_gone_between_handshake_and_read():
    with sides() as (source, target):
        source.leases.hold("a")
        target.load(source, "a", [1], [1])
        assert only(target.run()) == ({"a"}, set())
        source.server.close()
        source.ranks[0].agent.close()
        target.load(source, "b", HERE, THERE)
        assert only(target.run()) == (set(), {"b"})
        # The memory is this process's, so the read itself may still succeed; the commit cannot.
        failed = [k for k in ("handshake", "read", "commit") if counts(target)[f"failed_{k}"]]
        assert len(failed) == 1
        assert failed == ["commit"] or len(target.ranks[0].reader.peers) == 0


def test_a_read_that_times_out_is_cancelled_and_its_blocks_stay_untouched():
    with sides({"nixl_progress": "poll"}) as (source, target):
        # A prefill process that hangs: it answers handshakes and moves no transport.
        agent = source.ranks[0].agent
        agent._closed.set()
        agent._poller.join()
        source.leases.hold("a")
        target.load(source, "a", HERE, THERE)
        assert only(target.run(until="read")) == (set(), set())
        target.clock.advance(target.options.read_timeout_seconds + 0.1)
        assert only(target.run()) == (set(), {"a"})
        assert counts(target)["failed_timeout"] == 1
        assert target.ranks[0].reader.loads == {}
        assert len(target.ranks[0].reader.peers) == 0
        after = target.ranks[0].rows.bytes.clone()
        time.sleep(0.3)
        assert torch.equal(target.ranks[0].rows.bytes, after)
        agent._closed.clear()


def test_blocks_released_before_the_commit_are_not_used(caplog):
    with sides() as (source, target):
        source.leases.hold("a")
        source.clock.advance(source.options.lease_seconds)
        assert source.leases.take_released().expired == {"a"}
        target.load(source, "a", HERE, THERE)
        assert only(target.run()) == (set(), {"a"})
        assert counts(target)["failed_stale"] == 1
        assert source.leases.unknown_messages == 1
        assert "released before the commit: not renewed in time, freed 0.0 s ago" in caplog.text


def test_a_waiting_request_keeps_its_lease_by_renewal():
    with sides({"lease_seconds": 30}) as (source, target):
        source.leases.hold("a")
        client = target.ranks[0].client
        for _ in range(5):
            source.clock.advance(15)
            answer = client.ask(
                "127.0.0.1", source.port, source.engine, "renew", requests=["a", "b"]
            ).result()
            assert answer["held"] == {"a": True, "b": False}
            assert not source.leases.take_released().all
        source.clock.advance(29)
        assert not source.leases.take_released().all
        source.clock.advance(1)
        assert source.leases.take_released().expired == {"a"}


def test_a_commit_comes_again_when_its_answer_is_lost():
    """Same answer for the same read, also after the release; not for another read."""
    leases = LeaseTable(30.0)
    leases.hold("a")
    assert leases.commit("a", "d", 0, 1, "first")
    assert leases.take_released().done == {"a"}
    assert leases.commit("a", "d", 0, 1, "first")
    assert not leases.commit("a", "d", 0, 1, "second")
    assert not leases.commit("a", "e", 0, 1, "first")
    clock = Clock()
    leases = LeaseTable(10.0, clock)
    for i in range(50):
        clock.advance(1.0)
        leases.hold(f"{i}")
        assert leases.commit(f"{i}", "d", 0, 1, "x")
        leases.take_released()
    assert len(leases._held_commits) <= 12

    with sides() as (source, target):
        client, asked, again = target.ranks[0].client, [], threading.Event()
        answer, ask = source.server._answer, client.ask

        def late_when_first(message):
            out = answer(message)
            if message["op"] == "commit":
                source.leases.take_released()
                assert again.wait(PATIENCE)
            return out

        def impatient_at_first(*args, **fields):
            commits = [*asked, args[3]].count("commit")
            client.timeout = 0.3 if commits == 1 else PATIENCE
            asked.append(args[3])
            if commits == 2:
                again.set()
            return ask(*args, **fields)

        source.server._answer, client.ask = late_when_first, impatient_at_first
        source.leases.hold("a")
        target.load(source, "a", HERE, THERE)
        assert only(target.run()) == ({"a"}, set())
        assert arrived(source, target)
        assert asked == ["hello", "commit", "commit"]
        assert counts(target)["retries"] == 1
        assert len(counts(target)["seconds"]) == 1  # read once


def test_bad_block_ids_fail_the_load_alone():
    with sides() as (source, target):
        source.leases.hold("a")
        source.leases.hold("b")
        target.load(source, "a", [1, 2], [3, BLOCKS])
        target.load(source, "c", [1, 2], [3])
        target.load(source, "b", [4], [5])
        assert only(target.run()) == ({"b"}, {"a", "c"})


def test_nothing_is_left():
    """Threads, registrations and loads after 30 rounds of both ends of a transfer."""
    before = set(threading.enumerate())
    with sides() as (source, target):
        for i in range(30):
            source.leases.hold(f"{i}")
            target.load(source, f"{i}", HERE, THERE)
            if i % 3 == 0:
                target.load(source, f"x{i}", [1], [BLOCKS + 1])
            target.run()
            source.leases.take_released()
        assert target.ranks[0].agent.registrations == source.ranks[0].agent.registrations == 1
        assert len(source.leases) == 0
    assert not set(threading.enumerate()) - before


TOKENS = list(range(6 * 128 - 5))


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (4, 2), (8, 4)])
def test_debug_checks_pass_for_good_blocks(prefill, decode):
    debug = {"debug_checks": True}
    with sides(debug | {"tp": prefill}, debug | {"tp": decode}) as (source, target):
        marks = identities(TOKENS)
        for rank in source.ranks:
            rank.table.publish(THERE, marks)
        source.leases.hold("a")
        target.load(source, "a", HERE, THERE, marks)
        assert target.run() == [({"a"}, set())] * decode
        assert arrived(source, target)
        assert all(rank.agent.registrations == 2 for rank in target.ranks)


def _torn(source):
    row = source.ranks[0].rows.row
    last = row.pages[-1]
    source.ranks[0].rows.bytes[THERE[4], last.offset + last.page.page_bytes - 1] ^= 1


def _reused(source):
    source.ranks[0].table.withdraw(THERE)
    source.ranks[0].table.publish(THERE, identities([7, *TOKENS[1:]]))


def _withdrawn(source):
    source.ranks[0].table.withdraw(THERE[2:3])


@pytest.mark.parametrize(
    ("spoil", "counter", "words"),
    [
        (_torn, "failed_check", "block 4: checksum of run"),
        (_reused, "failed_check", "block 0: identity expected"),
        (_withdrawn, "failed_timeout", "not there after"),
    ],
)
def test_debug_checks_catch_bad_blocks(spoil, counter, words, caplog):
    debug = {"debug_checks": True}
    with sides(debug, debug) as (source, target):
        marks = identities(TOKENS)
        source.ranks[0].table.publish(THERE, marks)
        spoil(source)
        source.leases.hold("a")
        target.load(source, "a", HERE, THERE, marks)
        if counter == "failed_timeout":
            assert only(target.run(until="check")) == (set(), set())
            target.clock.advance(target.options.read_timeout_seconds + 0.1)
        assert only(target.run()) == (set(), {"a"})
        assert counts(target)[counter] == 1
        assert words in caplog.text
        assert target.ranks[0].agent.registrations == 2


def test_shared_blocks_stay_published_until_the_last_holder():
    with sides({"debug_checks": True}) as (source, _):
        table, marks = source.ranks[0].table, identities(TOKENS)
        table.publish(THERE, marks)
        table.publish(THERE[:2], marks[:2])
        table.withdraw(THERE)
        assert (table.table[THERE[:2], 0] == torch.tensor(marks[:2])).all()
        assert (table.table[THERE[2:], 0] == 0).all()
        table.withdraw(THERE[:2])
        assert (table.table[:, 0] == 0).all()


def test_identities_are_of_the_whole_prefix():
    base = identities(list(range(300)))
    assert len(base) == 3 and 0 not in base
    assert identities(list(range(256))) == base[:2]
    changed = identities([1, *range(1, 300)])
    assert all(a != b for a, b in zip(base, changed, strict=True))
    assert identities(list(range(299)))[2] != base[2]
    assert identities([]) == []


@pytest.mark.parametrize("order", ["hnd", "nhd"])
@pytest.mark.parametrize("tp", [1, 2])
def test_pages_of_vllms_packing_are_converted_on_arrival(order, tp):
    """The prefill side's pages are what vLLM's own NVFP4 writer would leave."""
    foreign = {"packing": f"vllm-{order}", "tp": tp}
    with sides(foreign, {"convert_packing": True, "tp": tp}) as (source, target):
        for i, rank in enumerate(source.ranks):
            rows = rank.rows
            for page in rows.row.pages:
                if page.sharded:
                    span = slice(page.offset, page.offset + page.page.page_bytes)
                    rows.bytes[:, span] = to_vllm(rows.bytes[:, span], page.page, order.upper())
            assert not torch.equal(rows.bytes, source.share(source.whole, i))
        before = target.ranks[0].rows.bytes.clone()
        source.leases.hold("a")
        target.load(source, "a", HERE, THERE)
        assert target.run() == [({"a"}, set())] * tp
        assert arrived(source, target)
        others = [b for b in range(BLOCKS) if b not in HERE]
        assert torch.equal(target.ranks[0].rows.bytes[others], before[others])
        assert counts(target)["descriptors"] == [3]

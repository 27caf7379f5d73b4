"""When a prefill engine frees blocks, and what it remembers of it."""

from rocm_msa.vllm_plugin.nixl.leases import LeaseTable
from tests.vllm_plugin.pd_ranks import Clock


def test_the_end_of_a_lease_is_remembered():
    clock = Clock()
    leases = LeaseTable(10.0, clock)
    for request in "abcd":
        leases.hold(request)
    assert leases.cancel("a") and leases.commit("b", "d1", 0, 1) and leases.commit("c", "d1", 0, 2)
    assert leases.fate("a") == "cancelled by its reader"
    clock.advance(12)
    leases.take_released()
    clock.advance(3)
    assert leases.fate("a") == "cancelled by its reader, freed 3.0 s ago"
    assert leases.fate("b") == "read by engine d1, freed 3.0 s ago"
    assert leases.fate("c") == "not read by every rank in time, freed 3.0 s ago"
    assert leases.fate("d") == "not renewed in time, freed 3.0 s ago"
    assert leases.fate("e") == "never held here, or long ago"


def test_duplicate_commits_and_two_readers():
    """Released after the expected number of distinct commits, once (public case C38)."""
    leases = LeaseTable(30.0)
    leases.hold("a")
    assert leases.commit("a", "one", 0, 2) and leases.commit("a", "one", 0, 2)
    assert not leases.take_released().all
    assert leases.commit("a", "two", 1, 2)
    assert not leases.take_released().all
    assert leases.commit("a", "one", 1, 2)
    # The other engine had not committed everything: it may have read what was freed.
    assert not leases.commit("a", "two", 0, 2)
    assert leases.take_released().done == {"a"}
    assert not leases.commit("a", "one", 1, 2)
    assert not leases.take_released().all
    assert leases.unknown_messages == 2

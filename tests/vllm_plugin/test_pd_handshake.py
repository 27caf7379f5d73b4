"""What both sides must agree on, the side channel's messages, and the options."""

from __future__ import annotations

import msgspec
import pytest
import torch
import zmq

from rocm_msa.errors import ConfigError
from rocm_msa.vllm_plugin.nixl.control import ControlServer
from rocm_msa.vllm_plugin.nixl.leases import LeaseTable
from rocm_msa.vllm_plugin.nixl.options import TransferOptions
from tests.vllm_plugin.pd_ranks import PATIENCE, only, sides

pytest.importorskip("nixl", reason="NIXL is not installed")

HERE, THERE = [5, 6, 7, 20, 21, 40], [1, 2, 3, 9, 10, 30]

DIFFERENCES = [
    ({"main": "fp8"}, {}, "main cache dtype: prefill has 'fp8', decode has 'nvfp4'"),
    ({"index": "fp8"}, {}, "index cache dtype: prefill has 'fp8', decode has 'nvfp4'"),
    ({"debug_checks": True}, {}, "debug_checks: prefill has True, decode has False"),
    (
        {"tp": 2, "allow_unequal_tp": False},
        {},
        "tensor-parallel size: prefill has 2, decode has 1, and prefill has allow_unequal_tp false",
    ),
    ({}, {"tp": 2, "allow_unequal_tp": False}, "decode has 2, and decode has allow_unequal_tp"),
    ({"packing": "vllm-hnd"}, {}, "packing: prefill has 'vllm-hnd', decode has 'rocm_msa'"),
    (
        {"packing": "vllm-hnd", "tp": 2},
        {"convert_packing": True},
        "pages of another packing cannot be read head by head (tp: prefill 2, decode 1)",
    ),
    (
        {"packing": "vllm-nhd", "main": "fp8"},
        {"convert_packing": True, "main": "fp8"},
        "only nvfp4 pages can be converted",
    ),
]


@pytest.mark.parametrize(("prefill", "decode", "words"), DIFFERENCES)
def test_both_sides_refuse_and_name_both_values(prefill, decode, words, caplog):
    with sides(prefill, decode) as (source, target):
        before = [rank.rows.bytes.clone() for rank in target.ranks]
        source.leases.hold("a")
        target.load(source, "a", HERE, THERE)
        assert all(result == (set(), {"a"}) for result in target.run())
        lines = [r.getMessage() for r in caplog.records if words in r.getMessage()]
        assert any("refused by prefill" in line for line in lines)
        assert any("handshake with engine" in line for line in lines)
        assert source.server.refused_handshakes >= 1
        for rank, old in zip(target.ranks, before, strict=True):
            assert torch.equal(rank.rows.bytes, old)
            assert rank.counts.data["failed_handshake"] == 1
            assert rank.counts.data["retries"] == 0


@pytest.mark.parametrize(
    "name",
    [
        *("page format", "row format", "row layout", "block tokens", "activation dtype"),
        *("num_layers", "kv_heads", "head_dim", "sparse layers", "rope", "kv scales"),
        *("draft model", "index_heads", "package format"),
    ],
)
def test_every_field_counts_on_both_sides(name, caplog):
    """Also when the prefill side does not check: the decode side compares for itself."""
    with sides() as (source, target):
        source.fingerprint[name] = "other"
        source.server.fingerprint[name] = "other"
        words = f"{name}: prefill has 'other', decode has {target.fingerprint[name]!r}"
        for checked in (True, False):
            if not checked:
                answer = {"fingerprint": source.server.fingerprint, "ranks": source.server.ranks}
                source.server._answer = lambda message, answer=answer: answer
            caplog.clear()
            target.load(source, "a", HERE, THERE)
            assert only(target.run()) == (set(), {"a"})
            assert words in caplog.text
            assert ("refused by prefill" in caplog.text) == checked


def test_another_engine_at_the_same_address_is_refused(caplog):
    with sides() as (source, target):
        stranger = source.engine
        source.server.engine = "restarted"
        target.load(source, "a", HERE, THERE)
        assert only(target.run()) == (set(), {"a"})
        assert f"engine: asked for {stranger}, this is restarted" in caplog.text


def test_malformed_messages_do_not_end_the_side_channel():
    with sides() as (source, target), zmq.Context() as context:
        with context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://127.0.0.1:{source.port}")
            fine = {"wire": 1, "to": source.engine}
            for message in (b"\xff", msgspec.msgpack.encode([1]), msgspec.msgpack.encode(fine)):
                socket.send(message)
                assert socket.poll(int(PATIENCE * 1000))
                assert "refused" in msgspec.msgpack.decode(socket.recv())
            socket.send(msgspec.msgpack.encode(fine | {"wire": 99, "op": "hello"}))
            assert socket.poll(int(PATIENCE * 1000))
            refusal = msgspec.msgpack.decode(socket.recv())["refused"]
            assert refusal == "package format: prefill has 1, decode has 99"
        source.leases.hold("a")
        target.load(source, "a", [1], [1])
        assert only(target.run()) == ({"a"}, set())


def _server(host: str, port: int) -> ControlServer:
    return ControlServer(host, port, "engine", {}, [], LeaseTable(1.0))


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("0.0.0.0", "expected an address that decode engines can reach, got '0.0.0.0'"),
        ("no-such-host.invalid", "expected an address or name of this machine"),
    ],
)
def test_the_side_channel_needs_an_address_that_others_can_reach(host, words):
    with pytest.raises(RuntimeError, match=words):
        _server(host, 0)


def test_a_taken_port_is_named():
    first = _server("localhost", 0)
    port = first.port
    try:
        with pytest.raises(RuntimeError, match=rf"side channel localhost:{port} .*in use"):
            _server("localhost", port)
    finally:
        first.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lease": 3}, "lease: unknown key"),
        ({"lease_seconds": 0}, "lease_seconds: expected a number of seconds > 0, got 0"),
        ({"retries": 1.5}, "retries: expected an integer >= 0, got 1.5"),
        ({"packing": "hnd"}, "packing: expected one of"),
        ({"debug_checks": 1}, "debug_checks: expected a bool, got 1"),
        ({"nixl_progress": "spin"}, 'nixl_progress: expected "thread" or "poll"'),
        ({"backends": "UCX"}, "backends: expected a list of backend names"),
    ],
)
def test_options_are_checked(given, words):
    with pytest.raises(ConfigError) as caught:
        TransferOptions.read(given | {"allow_unequal_tp": "yes"})
    assert words in str(caught.value)
    assert "allow_unequal_tp: expected a bool" in str(caught.value)


def test_options_are_read():
    made = TransferOptions.read({"backends": ["UCX"], "lease_seconds": 5, "nixl_progress": None})
    assert (made.backends, made.lease_seconds, made.nixl_progress) == (("UCX",), 5, None)

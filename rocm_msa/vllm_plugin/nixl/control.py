"""The side channel: small questions of decode engines, answered by a prefill engine's thread.

Messages are msgpack maps over ZeroMQ (TCP). Each names the engine it is meant for, so that a
restarted engine on the same port refuses what was meant for its predecessor.

    hello     fingerprint -> fingerprint and memory of every rank, or a refusal
    commit    a rank has read (or needs nothing more) -> whether the blocks were held all along
    renew     request ids -> which are still held, each with a full lease
    cancel    nobody will read it
"""

from __future__ import annotations

import contextlib
import logging
import socket as socket_module
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from socket import SOCK_STREAM
from typing import Any

import msgspec
import zmq

from rocm_msa.vllm_plugin.nixl.fingerprint import WIRE_VERSION, differences
from rocm_msa.vllm_plugin.nixl.leases import LeaseTable

logger = logging.getLogger("vllm.rocm_msa.nixl")

_POLL_MS = 100
_CLIENT_THREADS = 8
_PROBE_SECONDS = 1.0


class ControlError(RuntimeError):
    """No answer, or an answer that the peer could not give."""


class Refused(ControlError):
    """The peer answered that it will not: another engine, or another fingerprint."""


class ControlServer:
    """Answers for one engine. `ranks[i]` is what rank i registered, as a plain map.

    Port 0 takes a free one; `port` is the one it has.
    """

    def __init__(
        self,
        host: str,
        port: int,
        engine: str,
        fingerprint: Mapping[str, Any],
        ranks: list[dict[str, Any]],
        leases: LeaseTable,
    ):
        self.engine, self.fingerprint, self.ranks = engine, dict(fingerprint), ranks
        self.leases = leases
        self.refused_handshakes = 0
        address = _bind_host(host)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, address.startswith("["))
        try:
            self._socket.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RuntimeError(
                f"side channel {host}:{port} (VLLM_NIXL_SIDE_CHANNEL_HOST, _PORT): {error}"
            ) from None
        self.port = int(self._socket.getsockopt(zmq.LAST_ENDPOINT).rsplit(b":", 1)[1])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="rocm-msa-kv-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()  # its socket must not be closed under it; it looks every _POLL_MS
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(_POLL_MS):
                continue
            frames = self._socket.recv_multipart()
            try:
                answer = self._answer(msgspec.msgpack.decode(frames[-1]))
            except Exception as error:  # a bad message must not end the thread
                logger.exception("KV side channel: message not understood")
                answer = {"refused": f"message not understood: {error!r}"}
            self._socket.send_multipart([*frames[:-1], msgspec.msgpack.encode(answer)])

    def _answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if message["wire"] != WIRE_VERSION:
            return self._refuse(
                f"package format: prefill has {WIRE_VERSION}, decode has {message['wire']}"
            )
        if message["to"] != self.engine:
            return {"refused": f"engine: asked for {message['to']}, this is {self.engine}"}
        op = message["op"]
        if op == "hello":
            reasons = differences(self.fingerprint, message["fingerprint"])
            if reasons:
                return self._refuse("; ".join(reasons))
            return {"fingerprint": self.fingerprint, "ranks": self.ranks}
        if op == "commit":
            fields = (message[k] for k in ("request", "reader", "rank", "ranks", "read"))
            if self.leases.commit(*fields):
                return {"held": True}
            return {"held": False, "why": self.leases.fate(message["request"])}
        if op == "renew":
            return {"held": self.leases.renew(message["requests"])}
        if op == "cancel":
            return {"held": self.leases.cancel(message["request"])}
        return {"refused": f"op: unknown {op!r}"}

    def _refuse(self, reasons: str) -> dict[str, Any]:
        self.refused_handshakes += 1
        logger.error("KV transfer refused by prefill: %s", reasons)
        return {"refused": reasons}


class ControlClient:
    """Asks control servers from a few threads; an answer or an error comes within the timeout.

    ZeroMQ connects again and again and says nothing of it, so a late answer makes the client look
    whether the port still takes connections: a server that is gone is an error at once.

    A courtesy (a message that nobody waits for) to a server that has just been silent is not sent,
    so that many of them cannot hold up questions to other servers. `clock` gives seconds.
    """

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic):
        self.timeout, self._clock = timeout, clock
        self._silent_until: dict[str, float] = {}
        self._context = zmq.Context()
        self._threads = ThreadPoolExecutor(_CLIENT_THREADS, thread_name_prefix="rocm-msa-kv-ask")
        self._local = threading.local()

    def ask(
        self, host: str, port: int, engine: str, op: str, *, courtesy: bool = False, **fields: Any
    ) -> Future:
        """The answer's map; raises ControlError or Refused from the future."""
        message = {"wire": WIRE_VERSION, "to": engine, "op": op, **fields}
        return self._threads.submit(self._call, host, port, message, courtesy)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._context.destroy(linger=0)

    def _call(
        self, host: str, port: int, message: dict[str, Any], courtesy: bool
    ) -> dict[str, Any]:
        address = f"tcp://{_bracketed(host)}:{port}"
        if courtesy and self._clock() < self._silent_until.get(address, 0.0):
            raise ControlError(f"{message['op']}: {address} has been silent, not asked")
        sockets = self._local.__dict__.setdefault("sockets", {})
        if address not in sockets:
            sockets[address] = self._connect(address)
        socket = sockets[address]
        try:
            socket.send(msgspec.msgpack.encode(message))
            problem = self._wait(socket, host, port)
            if problem:
                self._silent_until[address] = self._clock() + self.timeout
                raise ControlError(f"{message['op']}: {address}: {problem}")
            answer = msgspec.msgpack.decode(socket.recv())
            self._silent_until.pop(address, None)
        except BaseException as error:
            # A REQ socket that got no answer cannot ask again.
            with contextlib.suppress(zmq.ZMQError):
                sockets.pop(address).close(linger=0)
            if isinstance(error, zmq.ZMQError):
                raise ControlError(f"{message['op']}: {address}: {error}") from None
            raise
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer

    def _wait(self, socket: zmq.Socket, host: str, port: int) -> str | None:
        """Until an answer is there; else why none will come."""
        end = time.monotonic() + self.timeout
        while True:
            left = max(0.0, end - time.monotonic())
            if socket.poll(int(1000 * min(left, _PROBE_SECONDS))):
                return None
            if left <= _PROBE_SECONDS:
                return f"no answer in {self.timeout} s"
            try:
                socket_module.create_connection((host, port), timeout=_PROBE_SECONDS).close()
            except ConnectionRefusedError:
                return "nobody listens there any more"
            except OSError:
                continue  # slow, or a name that does not resolve just now

    def _connect(self, address: str) -> zmq.Socket:
        socket = self._context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        if address.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        socket.connect(address)
        return socket


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _bind_host(host: str) -> str:
    """The address to bind: ZeroMQ takes addresses and interfaces, not names."""
    try:
        found = socket_module.getaddrinfo(host, None, type=SOCK_STREAM)
    except OSError as error:
        raise RuntimeError(
            f"VLLM_NIXL_SIDE_CHANNEL_HOST: expected an address or name of this machine, "
            f"got {host!r} ({error})"
        ) from None
    # IPv4 first, as a client that is given the name resolves it.
    address = min(found, key=lambda info: info[0] != socket_module.AF_INET)[4][0]
    if address in ("0.0.0.0", "::"):
        # It is handed to decode engines, which would look for themselves there.
        raise RuntimeError(
            "VLLM_NIXL_SIDE_CHANNEL_HOST: expected an address that decode engines can reach, "
            f"got {host!r}"
        )
    return _bracketed(address)

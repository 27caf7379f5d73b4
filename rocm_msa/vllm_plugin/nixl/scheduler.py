"""The scheduler's side: which blocks a request hands over, and which it reads.

Prefill: a finished request's blocks stay under a lease; its answer carries where they are. Decode:
a request with such parameters gets blocks for the whole prompt, a load for those that its own
prefix cache does not hold, and its lease is renewed while it waits.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Any

from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.vllm_plugin.nixl.checks import identities
from rocm_msa.vllm_plugin.nixl.control import ControlClient, ControlServer
from rocm_msa.vllm_plugin.nixl.leases import LeaseTable
from rocm_msa.vllm_plugin.nixl.options import TransferOptions
from rocm_msa.vllm_plugin.nixl.reader import Load, Remote
from rocm_msa.vllm_plugin.nixl.upstream import HANDED_OVER, KVConnectorMetadata, side_channel

logger = logging.getLogger("vllm.rocm_msa.nixl")

_REMOTE_KEYS = ("remote_engine_id", "remote_host", "remote_port", "remote_request_id")
_RENEWALS_A_LEASE = 3


@dataclass
class StepOrders(KVConnectorMetadata):
    """What the scheduler tells every rank in a step.

    loads: to start. forgets: handed-over requests of which nothing is needed. released, expired:
    own requests whose blocks are freed. published, withdrawn: debug mode, blocks that may be read
    (with their identities) and that may not any more.
    """

    loads: list[Load] = field(default_factory=list)
    forgets: list[Remote] = field(default_factory=list)
    released: set[str] = field(default_factory=set)
    expired: int = 0
    published: list[tuple[list[int], list[int]]] = field(default_factory=list)
    withdrawn: list[list[int]] = field(default_factory=list)


class RowScheduler:
    """One engine's scheduler half of the connector."""

    def __init__(self, vllm_config: Any, engine: str, options: TransferOptions):
        self.engine, self.options = engine, options
        self.tp = vllm_config.parallel_config.tensor_parallel_size
        self.host, self.port = side_channel(vllm_config)
        self.leases = LeaseTable(options.lease_seconds)
        self.server: ControlServer | None = None
        self.client = ControlClient(options.control_timeout_seconds)
        self._orders = StepOrders()
        self._held_blocks: dict[str, list[int]] = {}
        self._loading: dict[str, Remote] = {}  # request id -> what its ranks are reading
        self._renewals = Renewals(self.client, options.lease_seconds / _RENEWALS_A_LEASE)

    def serve(self, fingerprint: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        """Answer handshakes; once every rank has registered its memory."""
        if self.server is None:
            self.server = ControlServer(
                self.host, self.port, self.engine, fingerprint, ranks, self.leases
            )
            logger.info("KV side channel of engine %s: %s:%d", self.engine, self.host, self.port)

    def shutdown(self) -> None:
        self._renewals.close()
        self.client.close()
        if self.server is not None:
            self.server.close()

    # Decode

    def on_new_request(self, request: Any) -> None:
        remote = _remote(request)
        if remote is not None:
            self._renewals.add(request.request_id, remote)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Prompt tokens to load beyond `computed`, and that it is done between steps."""
        remote = _remote(request)
        if remote is None:
            return 0, False
        count = _available(request) - computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, block_ids: list[int], loaded_tokens: int) -> None:
        """A request got its blocks; `loaded_tokens` of them are to be read."""
        remote = _remote(request)
        if remote is None:
            return
        params = request.kv_transfer_params
        params["do_remote_prefill"] = False  # read once: a preempted request is recomputed
        if loaded_tokens == 0:
            self._orders.forgets.append(remote)
            self._renewals.remove(request.request_id)
            return
        available = _available(request)
        first, end = (available - loaded_tokens) // BLOCK_TOKENS, _blocks(available)
        load = Load(
            request.request_id,
            remote,
            list(block_ids[first:end]),
            _flat(params["remote_block_ids"])[first:end],
        )
        if self.options.debug_checks:
            load.identities = identities(request.prompt_token_ids[:available])[first:end]
        self._orders.loads.append(load)
        self._loading[request.request_id] = remote

    def loaded(self, request_ids: set[str]) -> None:
        """Their loads have ended, well or not."""
        for request_id in request_ids:
            self._renewals.remove(request_id)
            self._loading.pop(request_id, None)

    # Prefill

    def finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep a prefilled request's blocks and say where they are.

        A load goes on when its request is aborted: its lease is renewed until it ends. For a
        client that left, vLLM also finishes a second request with the same parameters, which must
        not cancel the lease under a load.

        Returns:
            Whether its blocks are kept, and the parameters for the decode engine.
        """
        remote = _remote(request)
        if request.request_id not in self._loading:
            self._renewals.remove(request.request_id)
        if remote is not None:
            request.kv_transfer_params["do_remote_prefill"] = False
            if remote in self._loading.values():
                return False, None
            # It ends before its KV was asked for: nobody will read it.
            self.client.ask(
                remote.host,
                remote.port,
                remote.engine,
                "cancel",
                courtesy=True,
                request=remote.request,
            )
            return False, None
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode") or request.status not in HANDED_OVER:
            return False, None
        if request.prompt_token_ids is None:
            logger.warning(
                "Request %s: a prompt without token ids is not handed over", request.request_id
            )
            return False, None
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        blocks = list(block_ids[: _blocks(tokens)])
        if not blocks:
            return False, None
        self.leases.hold(request.request_id)
        self._held_blocks[request.request_id] = blocks
        if self.options.debug_checks:
            marks = identities(request.prompt_token_ids[:tokens])
            self._orders.published.append((blocks, marks))
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self.engine,
            "remote_request_id": request.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_num_tokens": tokens,
            "tp_size": self.tp,
            "transfer_mode": "pull",
        }

    def take_orders(self) -> StepOrders:
        """What the ranks are told in this step."""
        orders, self._orders = self._orders, StepOrders()
        ended = self.leases.take_released()
        for request_id in ended.expired:
            logger.warning(
                "KV of request %s was not read within its lease of %g s; its blocks are freed",
                request_id,
                self.options.lease_seconds,
            )
        orders.released, orders.expired = ended.all, len(ended.expired)
        for request_id in ended.all:
            blocks = self._held_blocks.pop(request_id)
            if self.options.debug_checks:
                orders.withdrawn.append(blocks)
        return orders


class Renewals:
    """Renews the leases of requests that wait, from one thread."""

    def __init__(self, client: ControlClient, seconds: float):
        self._client, self._seconds = client, seconds
        self._requests: dict[str, Remote] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        with self._lock:
            return len(self._requests)

    def add(self, request_id: str, remote: Remote) -> None:
        with self._lock:
            self._requests[request_id] = remote
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="rocm-msa-kv-renew", daemon=True
                )
                self._thread.start()

    def remove(self, request_id: str) -> None:
        with self._lock:
            self._requests.pop(request_id, None)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=self._client.timeout)

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            by_peer: dict[tuple[str, str, int], list[str]] = {}
            with self._lock:
                for remote in self._requests.values():
                    by_peer.setdefault(remote.peer, []).append(remote.request)
            for (engine, host, port), requests in by_peer.items():
                self._client.ask(host, port, engine, "renew", courtesy=True, requests=requests)


def _remote(request: Any) -> Remote | None:
    """Where a request's KV lies, when its parameters ask to read it and are complete."""
    params = request.kv_transfer_params
    if not params or not params.get("do_remote_prefill"):
        return None
    complete = all(params.get(key) is not None for key in _REMOTE_KEYS)
    if not complete or request.prompt_token_ids is None or not params.get("remote_block_ids"):
        logger.warning(
            "Request %s: kv_transfer_params without %s or blocks, or a prompt without token ids; "
            "its prompt is computed here",
            request.request_id,
            [key for key in _REMOTE_KEYS if params.get(key) is None],
        )
        params["do_remote_prefill"] = False
        return None
    return Remote(
        str(params["remote_engine_id"]),
        str(params["remote_host"]),
        int(params["remote_port"]),
        str(params["remote_request_id"]),
    )


def _available(request: Any) -> int:
    """Prompt tokens whose KV the prefill engine holds."""
    params = request.kv_transfer_params
    held = len(_flat(params["remote_block_ids"])) * BLOCK_TOKENS
    offered = params.get("remote_num_tokens") or request.num_prompt_tokens
    return min(request.num_prompt_tokens, offered, held)


def _flat(block_ids: Any) -> list[int]:
    """Block ids of the one KV cache group, given as a list or as a list of one list."""
    if block_ids and isinstance(block_ids[0], list | tuple):
        return list(block_ids[0])
    return list(block_ids)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)

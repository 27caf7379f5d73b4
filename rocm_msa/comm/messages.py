"""Bounded messages of CPU tensors between the ranks of a torch.distributed group (gloo)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist


class PeerFault(RuntimeError):
    """A message that did not arrive or could not be sent, or not in time. peer: of that message."""

    def __init__(self, peer: int, detail: str):
        self.peer = peer
        super().__init__(detail)

    def __reduce__(self):
        return type(self), (self.peer, str(self))


def swap(
    group: dist.ProcessGroup | None,
    to: Mapping[int, torch.Tensor],
    into: Mapping[int, torch.Tensor],
    timeout: timedelta,
) -> None:
    """Send `to[peer]` and receive `into[peer]`, all at once; nothing that is empty.

    Args:
        to, into: contiguous tensors by rank; sizes are those that the peer expects.
        timeout: of each message.

    Raises:
        PeerFault: names the first peer whose message failed.
    """
    pending = []
    for receive, tensors in ((True, into), (False, to)):
        for peer, tensor in tensors.items():
            if tensor.numel():
                pending.append((peer, _named(peer, _start, group, receive, peer, tensor)))
    for peer, work in pending:
        _named(peer, work.wait, timeout)


def _start(group, receive: bool, peer: int, tensor: torch.Tensor) -> dist.Work:
    data = tensor.view(torch.uint8)
    if receive:
        return dist.irecv(data, group=group, group_src=peer)
    return dist.isend(data, group=group, group_dst=peer)


def _named(peer: int, call, *args):
    """Turn what torch.distributed raises into the error that names the peer."""
    try:
        return call(*args)
    except RuntimeError as error:
        raise PeerFault(peer, str(error)) from error

"""One connection a request, with the ways in which clients leave; and what came back."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass, field
from typing import Any

from tests.soak.traffic import Case

TIMEOUT_SECONDS = 900


@dataclass
class Result:
    """What a client saw.

    status: the answer's, 0 where the client did not wait for one.
    error: the error object of the answer, or of an event in its stream.
    tokens: token ids of each choice.
    done: the stream ended as it should; True for answers that are not streamed.
    """

    status: int = 0
    error: dict[str, Any] | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    done: bool = False


def send(port: int, case: Case) -> Result:
    """Send `case` to the server on this machine, and leave as it says."""
    if case.kind == "garbage":
        return _garbage(port, case.data)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        connection.putrequest("POST", case.path)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(case.data)))
        connection.endheaders()
        if case.kind == "half":
            connection.send(case.data[: len(case.data) // 2])
            return Result()
        connection.send(case.data)
        if case.kind == "vanish" or (case.kind == "leave" and case.events == 0):
            return Result()
        with connection.getresponse() as response:
            return _read(response, case)
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, case: Case) -> Result:
    result = Result(response.status)
    if "text/event-stream" not in response.headers.get("Content-Type", ""):
        body = response.read()
        result.done = True
        answer = json.loads(body)
        result.error = answer.get("error")
        _collect(result, answer)
        return result
    seen = 0
    for raw in response:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            result.done = True
            break
        if not line.startswith("data: "):
            continue
        event = json.loads(line[6:])
        result.error = result.error or event.get("error")
        _collect(result, event)
        seen += 1
        if case.kind == "leave" and seen >= case.events:
            break
    return result


def _collect(result: Result, answer: dict[str, Any]) -> None:
    for choice in answer.get("choices") or ():
        tokens = result.tokens.setdefault(choice["index"], [])
        tokens += choice.get("token_ids") or ()


def _garbage(port: int, data: bytes) -> Result:
    """Bytes that are no request; the status of the answer, 0 when the server just closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while piece := connection.recv(4096):
                answer += piece
        except ConnectionResetError:
            pass
    status = answer.split(b" ", 2)[1:2] if answer.startswith(b"HTTP/") else []
    return Result(int(status[0]) if status else 0, done=True)


def fault(case: Case, result: Result) -> str | None:
    """What is wrong with the answer, None for a right one."""
    code = result.error.get("code") if isinstance(result.error, dict) else None
    if result.status >= 500 or (isinstance(code, int) and code >= 500):
        return f"{case.kind}: status {result.status}, error {result.error}"
    if case.kind in ("vanish", "half", "garbage") or (case.kind == "leave" and not case.events):
        return None if result.status in (0, 400) else f"{case.kind}: status {result.status}"
    if case.kind == "refused":
        refused = 400 <= result.status < 500 or (result.status == 200 and result.error)
        return None if refused else f"refused: status {result.status} for {case.data[:200]}"
    if case.kind == "strange":
        return None if result.status == 200 or result.error else f"strange: {result.status}"
    if result.status != 200 or result.error:
        return f"{case.kind}: status {result.status}, error {result.error}"
    if case.kind == "leave":
        return None
    if not result.done:
        return f"{case.kind}: the stream broke off"
    if case.tokens is not None and result.tokens != {0: list(case.tokens)}:
        return f"known: {result.tokens}, expected {list(case.tokens)} for {case.data[:200]}"
    got = sum(map(len, result.tokens.values()))
    if case.count and got != case.count:
        return f"sampled: {got} tokens, expected {case.count}"
    return None

"""Requests to an OpenAI-compatible server with the standard library, and what came back."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rocm_msa.demo.server import DemoError, open_url

TIMEOUT_SECONDS = 180
_GREEDY = {"temperature": 0, "seed": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Answer:
    """An answer: tokens as the server counts them, seconds as the client saw them."""

    text: str
    prompt_tokens: int
    tokens: int
    first_token_s: float
    total_s: float


@dataclass(frozen=True)
class Token:
    """A greedy token; margin: how far its log-probability is above the second best."""

    id: int
    logprob: float
    margin: float


@dataclass(frozen=True)
class Sample:
    """A sample of the server's /metrics."""

    name: str
    labels: dict[str, str]
    value: float


class Client:
    """One server, one model. timeout: seconds without a byte of an answer."""

    def __init__(self, url: str, model: str, timeout: float = TIMEOUT_SECONDS):
        self.url, self.model, self.timeout = url, model, timeout

    def chat(self, message: str, tokens: int, on_text: Callable[[str], None]) -> Answer:
        """A streaming chat request; `on_text` gets each piece as it comes."""
        body = {"messages": [{"role": "user", "content": message}], "max_tokens": tokens}
        return self._stream("/v1/chat/completions", body, on_text)

    def complete(self, prompt: str | list[int], tokens: int) -> Answer:
        """A completion of text or token ids, streamed so that the first token can be timed."""
        body = {"prompt": prompt, "max_tokens": tokens}
        return self._stream("/v1/completions", body, lambda text: None)

    def greedy(self, prompt: list[int], tokens: int) -> list[Token]:
        """A completion of token ids, with the ids that came and their log-probabilities."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
            **_GREEDY,
        }
        (choice,) = self._json("/v1/completions", body)["choices"]
        said = choice["logprobs"]
        if len(said["tokens"]) != tokens:
            raise DemoError(f"asked for {tokens} tokens, got {len(said['tokens'])}")
        steps = zip(said["tokens"], said["token_logprobs"], said["top_logprobs"], strict=True)
        return [
            Token(
                int(name.removeprefix("token_id:")),
                logprob,
                logprob - max(v for k, v in best.items() if k != name),
            )
            for name, logprob, best in steps
        ]

    def samples(self, prefix: str) -> list[Sample]:
        """Samples of /metrics whose names begin like this."""
        text = self._request("/metrics", None).read().decode()
        found = re.findall(r"^([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
        return [
            Sample(name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value))
            for name, labels, value in found
            if name.startswith(prefix)
        ]

    def tokenize(self, text: str) -> list[int]:
        return self._json("/tokenize", {"model": self.model, "prompt": text})["tokens"]

    def cache_info(self) -> dict[str, str]:
        """Labels of the server's `vllm:cache_config_info`."""
        text = self._request("/metrics", None).read().decode()
        match = re.search(r"^vllm:cache_config_info\{(.*)\}", text, re.MULTILINE)
        if match is None:
            raise DemoError("the server's /metrics has no vllm:cache_config_info")
        return dict(re.findall(r'(\w+)="([^"]*)"', match[1]))

    def _json(self, path: str, body: dict[str, Any]) -> Any:
        with self._request(path, body) as response:
            return json.load(response)

    def _request(self, path: str, body: dict[str, Any] | None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            return open_url(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:500]
            raise DemoError(f"{path}: the server answered {error.code}: {detail}") from None
        except OSError as error:
            raise DemoError(f"{path}: no answer from the server: {error}") from None

    def _stream(self, path: str, body: dict[str, Any], on_text: Callable[[str], None]) -> Answer:
        body = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_GREEDY,
            **body,
        }
        start = time.monotonic()
        first, pieces, usage = 0.0, [], {}
        with self._request(path, body) as response:
            for event in _events(response, path):
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    if text:
                        first = first or time.monotonic() - start
                        pieces.append(text)
                        on_text(text)
        total = time.monotonic() - start
        asked, got = body["max_tokens"], usage.get("completion_tokens", 0)
        if got != asked:
            raise DemoError(f"{path}: asked for {asked} tokens, got {got}")
        return Answer("".join(pieces), usage["prompt_tokens"], got, first or total, total)


def _events(response: Any, path: str) -> Iterator[dict[str, Any]]:
    """Events of a server-sent event stream, up to [DONE]."""
    try:
        for raw in response:
            line = raw.decode(errors="replace").strip()
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise DemoError(f"{path}: the server reported {event['error']}")
                yield event
    except OSError as error:
        raise DemoError(f"{path}: the stream broke off: {error}") from None
    raise DemoError(f"{path}: the stream ended without [DONE]")

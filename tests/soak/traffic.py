"""The soak's requests: what clients do well, badly and rudely, the same for the same seed.

A `Known` is a greedy request and its answer, made by asking the idle server once. Its answer ends
before the first token whose two best candidates are closer than MARGIN: the rounding of another
batch (measured: 5e-6) could not turn any of what is left.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

MODEL = "soak"
MAX_LENGTH = 2048
VOCABULARY = 1024
MARGIN = 1e-3
ANSWER_TOKENS = 12
ENDLESS_TOKENS = 1000
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]
MIX = {
    "known": 32,
    "sampled": 8,
    "rare": 8,
    "leave": 14,
    "vanish": 8,
    "half": 4,
    "refused": 20,
    "garbage": 2,
    "strange": 4,
}
"""kind -> how many of 100 requests."""


@dataclass(frozen=True)
class Known:
    """A greedy request without its length, and the token ids that answer it."""

    path: str
    body: dict[str, Any]
    tokens: tuple[int, ...] = ()

    def request(self, stream: bool) -> dict[str, Any]:
        return {**self.body, "max_tokens": len(self.tokens), "stream": stream}


@dataclass(frozen=True)
class Case:
    """One request of the soak.

    kind: a key of MIX.
    data: the request's body, or all bytes of the connection (`garbage`).
    stream: whether the body asks for a stream.
    events: after how many of its events the client leaves (`leave`).
    tokens: the right answer (`known`), or None.
    count: how many tokens the answer has (`sampled`), summed over its choices.
    """

    kind: str
    path: str
    data: bytes
    stream: bool = False
    events: int = 0
    tokens: tuple[int, ...] | None = None
    count: int = 0


def unanswered(rng: random.Random, count: int) -> list[Known]:
    """`count` greedy requests, their answers to be filled in: completions, chats, tools."""
    edges = [1, 2, 127, 128, 129, 255, 257, MAX_LENGTH - ANSWER_TOKENS]
    found = []
    for i in range(count):
        if i % 4 < 2:
            length = edges.pop() if edges else rng.randrange(1, MAX_LENGTH - ANSWER_TOKENS)
            body = {"prompt": [rng.randrange(VOCABULARY) for _ in range(length)]}
            found.append(Known(COMPLETIONS, {"model": MODEL, **GREEDY, **body}))
            continue
        words = " ".join(rng.choice(("a", "block", "of", "keys", "7")) for _ in range(8 + 4 * i))
        body = {"messages": [{"role": "user", "content": words}]}
        if i % 4 == 3:
            body |= {"tools": TOOLS, "tool_choice": rng.choice(("auto", "none"))}
        found.append(Known(CHAT, {"model": MODEL, **GREEDY, **body}))
    return found


def answer(known: Known, choice: dict[str, Any]) -> Known:
    """`known` with the tokens of the server's choice, up to the first near tie."""
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        best = [[top["logprob"] for top in at["top_logprobs"]] for at in logprobs["content"]]
    else:
        best = [list(at.values()) for at in logprobs["top_logprobs"]]
    tokens = []
    for token, values in zip(choice["token_ids"], best, strict=True):
        first, second = sorted(values, reverse=True)[:2]
        if first - second < MARGIN:
            break
        tokens.append(token)
    return replace(known, tokens=tuple(tokens))


def plan(rng: random.Random, known: list[Known], count: int) -> list[Case]:
    """`count` requests in a random order; each kind of MIX has its share, the rest are `known`."""
    kinds = [kind for kind, share in MIX.items() for _ in range(share * count // 100)]
    kinds += ["known"] * (count - len(kinds))
    rng.shuffle(kinds)
    return [_case(kind, rng, known) for kind in kinds]


def _case(kind: str, rng: random.Random, known: list[Known]) -> Case:
    stream = rng.random() < 0.5
    if kind == "known":
        one = rng.choice(known)
        return Case(kind, one.path, _json(one.request(stream)), stream, tokens=one.tokens)
    if kind == "sampled":
        n, tokens = rng.choice((1, 1, 2, 3)), rng.randrange(1, ANSWER_TOKENS)
        body = _new_prompt(rng) | {"temperature": 1.0, "top_p": 0.9, "seed": rng.randrange(2**31)}
        body |= {"n": n, "max_tokens": tokens, "stream": stream, "ignore_eos": True}
        data = _json(body | {"return_token_ids": True})
        return Case(kind, COMPLETIONS, data, stream, count=n * tokens)
    if kind == "rare":
        body = _new_prompt(rng) | {"max_tokens": 6, "seed": 7, "stream": stream}
        return Case(kind, COMPLETIONS, _json(body | rng.choice(RARE)), stream)
    if kind == "leave":
        body = rng.choice(known).body if rng.random() < 0.5 else _new_prompt(rng)
        path = CHAT if "messages" in body else COMPLETIONS
        body = body | {"max_tokens": _room(body), "ignore_eos": True, "stream": True}
        return Case(kind, path, _json(body), True, events=rng.randrange(4))
    if kind in ("vanish", "half"):
        body = _new_prompt(rng) | {"ignore_eos": True, "stream": stream}
        return Case(kind, COMPLETIONS, _json(body | {"max_tokens": _room(body)}), stream)
    if kind == "garbage":
        return Case(kind, "", rng.choice(GARBAGE) + rng.randbytes(rng.randrange(200)))
    if kind == "strange":
        return Case(kind, CHAT, _json(rng.choice(STRANGE) | {"stream": stream}), stream)
    path, data = rng.choice(REFUSED)
    return Case(kind, path, data)


def _room(body: dict[str, Any]) -> int:
    return min(ENDLESS_TOKENS, MAX_LENGTH - len(body.get("prompt", ())))


def _new_prompt(rng: random.Random) -> dict[str, Any]:
    length = rng.choice((rng.randrange(1, 200), rng.randrange(1, 1500)))
    return {"model": MODEL, "prompt": [rng.randrange(VOCABULARY) for _ in range(length)]}


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


RARE = (
    *({"logprobs": 5}, {"prompt_logprobs": 2, "stream": False}, {"echo": True, "logprobs": 1}),
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    *({"min_p": 0.1}, {"top_k": 5, "temperature": 1.5}, {"logit_bias": {"5": 20, "6": -20}}),
    *({"bad_words": ["the"]}, {"allowed_token_ids": [5, 6, 7]}, {"stop": ["e"]}, {"seed": None}),
    *({"stop_token_ids": [5, 6]}, {"min_tokens": 4}, {"n": 3, "logprobs": 2}, {"seed": -1}),
    *({"structured_outputs": {"regex": "[ab]{3}"}}, {"structured_outputs": {"choice": ["a", "b"]}}),
    *({"response_format": {"type": "json_object"}}, {"prompt": [[5, 6], [7, 8, 9]], "n": 2}),
    *({"use_beam_search": True, "n": 2, "stream": False}, {"truncate_prompt_tokens": 5}),
    *({"cache_salt": "x"}, {"prompt": "text \u00fc \U0001f600"}, {"suffix": None, "user": "x"}),
)
"""Parameters that few clients use; each request is answered."""
GARBAGE = (b"\x16\x03\x01\x02", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\x00\r\n\r\n")
_CALL = {"id": "1", "type": "function", "function": {"name": "f"}}
_ONE = {"role": "user", "content": "x"}


def _refused() -> list[tuple[str, bytes]]:
    """(path, body) of requests that are the client's fault."""
    both = [
        *({"temperature": -1}, {"temperature": "x"}, {"top_p": 2}, {"top_p": 0}, {"top_k": -5}),
        *({"min_p": 2}, {"max_tokens": -1}, {"max_tokens": "x"}, {"max_tokens": 10**30}),
        *({"n": 0}, {"n": -1}, {"n": 10**9}, {"n": 10**30}, {"model": "other"}, {"seed": 2**70}),
        *({"stop": [1]}, {"stop": [""]}, {"stop_token_ids": ["x"]}, {"stop_token_ids": [2**70]}),
        *({"logit_bias": {"99999": 1}}, {"logit_bias": {"x": 1}}, {"allowed_token_ids": []}),
        *({"allowed_token_ids": [-1]}, {"allowed_token_ids": [99999]}, {"min_tokens": 50}),
        *({"presence_penalty": 9}, {"frequency_penalty": -9}, {"repetition_penalty": 0}),
        *({"stream": "x"}, {"stream_options": {"include_usage": True}}, {"priority": "x"}),
        *({"response_format": {"type": "other"}}, {"structured_outputs": {"regex": "("}}),
        *({"structured_outputs": {"choice": []}}, {"prompt_logprobs": 10**6}, {"ignore_eos": "x"}),
        *({"kv_transfer_params": "x"}, {"truncate_prompt_tokens": 10**9}, {"cache_salt": 5}),
    ]
    completion = [
        *({"prompt": [VOCABULARY]}, {"prompt": [-1]}, {"prompt": [2**70]}, {"prompt": [[5], "x"]}),
        *({"prompt": []}, {"prompt": ""}, {"prompt": [[]]}, {"prompt": None}, {"prompt": {"a": 1}}),
        *({"prompt": [[5], [99999]]}, {"prompt": [5.5]}, {"prompt": [5] * (MAX_LENGTH + 1)}),
        *({"prompt": [5] * MAX_LENGTH}, {"prompt": "word " * 5000}, {"logprobs": 10**6}),
        *({"prompt": [99999], "stream": True}, {"prompt": [5] * 3000, "stream": True}),
        *({"logprobs": -1}, {"logprobs": 10**6, "stream": True}, {"n": 0, "stream": True}),
    ]
    chat = [
        *({"messages": []}, {"messages": "x"}, {"messages": [{}]}, {"top_logprobs": 5}),
        *({"messages": [{"role": "user", "content": 5}]}, {"messages": [{"role": 5}]}),
        {"messages": [{"role": "user", "content": [{"type": "other"}]}]},
        {"messages": [{"role": "user", "content": "word " * 5000}]},
        {"messages": [{"role": "user", "content": "word " * 5000}], "stream": True},
        {"messages": [_ONE, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
        {"messages": [_ONE, {"role": "assistant", "content": None, "tool_calls": [_CALL]}]},
        *({"tools": "x"}, {"tools": [{}]}, {"tools": [{"type": "function", "function": {}}]}),
        *({"tools": TOOLS, "tool_choice": "other"}, {"tool_choice": "required"}),
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        *({"chat_template_kwargs": "x"}, {"logprobs": True, "top_logprobs": 10**6}),
        {"add_generation_prompt": True, "continue_final_message": True},
    ]
    text = {"model": MODEL, "prompt": [5, 6], "max_tokens": 2}
    talk = {"model": MODEL, "messages": [_ONE], "max_tokens": 2}
    bodies = [(COMPLETIONS, _json(text | change)) for change in both + completion]
    bodies += [(CHAT, _json(talk | change)) for change in both + chat]
    raw = [b"", b"{", b"[1, 2]", b"null", b'"x"', b"1e999", b"\xff\xfe{}", b"[" * 20000]
    raw += [b'{"model": "soak", "prompt": "x",}', b'{"model": "soak", "prompt": "\\ud800"}']
    raw += [b'{"model": "soak", "prompt": "x", "temperature": NaN}']
    bodies += [(path, data) for path in (COMPLETIONS, CHAT) for data in raw]
    return [*bodies, ("/v1/no_such_path", _json(text)), ("/detokenize", b'{"tokens": [-1]}')]


REFUSED = _refused()


def _strange() -> list[dict[str, Any]]:
    """Chats with tools whose parameters are no schema: answered or refused, nothing else."""
    schemas = [
        *({"type": "other"}, {"$ref": "#/none"}, {"properties": 5}, {"properties": ["a"]}),
        *({"properties": {"a": 5}}, {"properties": {"a": {"anyOf": 5}}}, {"required": 5}),
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
    ]
    named = {"type": "function", "function": {"name": "f"}}
    return [
        {
            "model": MODEL,
            "messages": [_ONE],
            "max_tokens": 3,
            "tool_choice": choice,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        }
        for schema in schemas
        for choice in ("auto", "required", named)
    ]


STRANGE = _strange()

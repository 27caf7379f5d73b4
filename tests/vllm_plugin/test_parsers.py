"""Scripted answers through the parser that vLLM's serving layer builds for `minimax_m3`.

Each answer is cut in two at every character, and into pieces of a few fixed widths; what comes out
is the same each time, and as for the whole answer. The tokens of a piece are those of its own text.
"""

from __future__ import annotations

import json
import random
import re

import pytest

from rocm_msa.vllm_plugin.parsers import THINK, well_formed

NS = "]<]minimax[>["
FUNCTIONS = {
    "f": {
        "path": {"type": "string"},
        "n": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "o": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "array", "items": {"type": "number"}},
            },
        },
    },
    "g": {},
    "h": {"path": {"type": "integer"}},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }
    for name, properties in FUNCTIONS.items()
]


def element(name: str, *value: str) -> str:
    return f"{NS}<{name}>{''.join(value)}{NS}</{name}>"


def invoke(name: str, *body: str) -> str:
    return f'{NS}<invoke name="{name}">{"".join(body)}{NS}</invoke>\n'


def block(*invokes: str) -> str:
    return f"{NS}<tool_call>\n{''.join(invokes)}{NS}</tool_call>"


def think(text: str) -> str:
    return f"<mm:think>{text}</mm:think>"


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    from vllm.plugins import load_general_plugins
    from vllm.tokenizers import get_tokenizer

    load_general_plugins()
    return get_tokenizer(checkpoint)


def request(**options):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    defaults = {"tools": TOOLS, "tool_choice": "auto"}
    messages = [{"role": "user", "content": "x"}]
    return ChatCompletionRequest(model="m", messages=messages, **(defaults | options))


class Reader:
    """Reads answers through the parser class of the given options."""

    def __init__(self, tokenizer, *, tools=True, reasoning=True, thinking=False, upstream=False):
        from vllm.parser.parser_manager import ParserManager

        name = "minimax_m3"
        self.tokenizer = tokenizer
        self.template = {"thinking_mode": "enabled"} if thinking else {}
        self.parser_class = ParserManager.get_parser(
            tool_parser_name=name if tools else None,
            reasoning_parser_name=name if reasoning else None,
            enable_auto_tools=tools,
            tokenizer=tokenizer,
        )
        if upstream:
            from vllm.parser.abstract_parser import DelegatingParser

            parts = ("reasoning_parser_cls", "tool_parser_cls")
            members = {part: getattr(self.parser_class, part) for part in parts}
            self.parser_class = type("Upstream", (DelegatingParser,), members)
        self.auto = tools

    def _parser(self, asked):
        return self.parser_class(self.tokenizer, asked.tools, chat_template_kwargs=self.template)

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def whole(self, text: str, **options):
        """(reasoning, content, [(name, arguments)]) of an answer that is not streamed."""
        asked = request(**options)
        parser = self._parser(asked)
        reasoning, content, calls = parser.parse(text, asked, self.auto, self.tokens(text))
        found = [(call.name, call.arguments) for call in calls or []]
        return reasoning or "", content or "", found

    def streamed(self, text: str, cuts, prompt=(1, 2, 3), **options):
        """The same of an answer that comes in pieces, put together as a client does."""
        asked = request(stream=True, **options)
        parser = self._parser(asked)
        ends = [*cuts, len(text)]
        pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        reasoning = content = ""
        calls: dict[int, list[str]] = {}
        for i, piece in enumerate(pieces):
            message = parser.parse_delta(
                piece,
                self.tokens(piece),
                asked,
                list(prompt) if i == 0 else None,
                finished=i == len(pieces) - 1,
            )
            if message is None:
                continue
            reasoning += message.reasoning or ""
            content += message.content or ""
            for call in message.tool_calls or []:
                parts = calls.setdefault(call.index, ["", ""])
                parts[0] += call.function.name or ""
                parts[1] += call.function.arguments or ""
        assert list(calls) == list(range(len(calls)))
        return reasoning, content, [tuple(parts) for parts in calls.values()]

    def every_way(self, text: str, **options):
        """What all ways of cutting `text` give; AssertionError names the first that differs."""
        expected = self.whole(text, **options)
        cuts = {f"cut at {k}": [k] for k in range(1, len(text))}
        cuts |= {f"width {w}": range(w, len(text), w) for w in (1, 2, 3, 5, 7)}
        cuts["one piece"] = []
        for name, places in cuts.items():
            got = self.streamed(text, places, **options)
            assert got == expected, f"{name}: {got}, whole: {expected}"
        return expected


NESTED = element("o", element("a", "1"), element("b", element("item", "1.5"), element("item", "2")))
TAGS = element("tags", element("item", "x"), element("item", "y"))
HALF = f'{NS}<invoke name="f">'

CASES = {
    "no marker": ("a < b", ("", "a < b", [])),
    "less-than first": ("<a>", ("", "<a>", [])),
    "ends in a marker's first characters": ("a <mm", ("", "a <mm", [])),
    "reasoning": (think("why") + "hello", ("why", "hello", [])),
    "reasoning twice": (think("a") + "b" + think("c") + "d", ("ac", "bd", [])),
    "reasoning after content": ("hi " + think("r") + "x", ("r", "hi x", [])),
    "stray closer": ("</mm:think>hello</mm:think>", ("", "hello", [])),
    "never closed": ("<mm:think>why", ("why", "", [])),
    "one call": (
        think("why") + "ok " + block(invoke("f", element("path", "a/b"), element("n", "3"))),
        ("why", "ok ", [("f", {"path": "a/b", "n": 3})]),
    ),
    "two calls at once": (
        block(invoke("f", element("path", "a")), invoke("g")),
        ("", "", [("f", {"path": "a"}), ("g", {})]),
    ),
    "two blocks": (
        block(invoke("g")) + "\n" + block(invoke("f", element("n", "1"))),
        ("", "", [("g", {}), ("f", {"n": 1})]),
    ),
    "same arguments, other schema": (
        block(invoke("f", element("path", "1")), invoke("h", element("path", "1"))),
        ("", "", [("f", {"path": "1"}), ("h", {"path": 1})]),
    ),
    "nested": (
        block(invoke("f", NESTED, TAGS)),
        ("", "", [("f", {"o": {"a": 1, "b": [1.5, 2]}, "tags": ["x", "y"]})]),
    ),
    "value that looks like markup": (
        block(invoke("f", element("path", "x</path>y<invoke></tool_call><mm:think>"))),
        ("", "", [("f", {"path": "x</path>y<invoke></tool_call><mm:think>"})]),
    ),
    "more than ASCII": (
        think("größe") + block(invoke("f", element("path", "日本 ü"))),
        ("größe", "", [("f", {"path": "日本 ü"})]),
    ),
    "no outer close": (
        f"t{NS}<tool_call>\n" + invoke("f", element("path", "a")),
        ("", "t", [("f", {"path": "a"})]),
    ),
    "no outer open": (
        "t" + invoke("f", element("path", "a")) + f"{NS}</tool_call>",
        ("", "t", [("f", {"path": "a"})]),
    ),
    "cut short in a parameter": (
        f"t{NS}<tool_call>\n{HALF}{NS}<path>abc",
        ("", 't<invoke name="f"><path>abc', []),
    ),
    "cut short between parameters": (
        f"t{NS}<tool_call>\n{HALF}" + element("n", "1"),
        ("", 't<invoke name="f"><n>1</n>', []),
    ),
    "cut short in a name": (f't{NS}<tool_call>\n{NS}<invoke name="f', ("", 't<invoke name="f', [])),
    "whole call, then one cut short": (
        f"{NS}<tool_call>\n" + invoke("g") + HALF + element("n", "1"),
        ("", '<invoke name="f"><n>1</n>', [("g", {})]),
    ),
    "malformed call, then a whole one": (
        block(HALF + f"{NS}<path>a{NS}</invoke>\n", invoke("g")),
        ("", '<invoke name="f"><path>a</invoke>', [("g", {})]),
    ),
    "no invoke in a block": (block("nothing"), ("", "\nnothing", [])),
    "empty block": (block(), ("", "", [])),
    "opener alone": (f"t{NS}<tool_call>", ("", "t", [])),
    "namespace alone": (f"a {NS} b", ("", "a  b", [])),
    "unknown tool": (block(invoke("z", element("x", "1"))), ("", "", [("z", {"x": "1"})])),
}


def decoded(answer):
    reasoning, content, calls = answer
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in calls]


def no_marker(text: str) -> bool:
    return not any(marker in text for marker in (NS, *THINK.values()))


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_an_answer_is_read_alike_however_it_is_cut(text, expected, tokenizer):
    """C51: calls are whole and typed by the schema, and no marker is left in the content."""
    got = decoded(Reader(tokenizer).every_way(text))
    assert got == expected
    assert no_marker(got[1])


def test_thinking_that_the_prompt_opened(tokenizer):
    reader = Reader(tokenizer, thinking=True)
    text = "why</mm:think>ok" + block(invoke("g"))
    assert decoded(reader.every_way(text)) == ("why", "ok", [("g", {})])
    assert reader.every_way("why<mm:think>") == ("why", "", [])


def test_reasoning_in_a_later_turn(tokenizer):
    """An earlier turn's closed think block in the prompt says nothing about this answer."""
    reader = Reader(tokenizer)
    prompt = reader.tokens(think("earlier") + "answer[e~[")
    text = think("why") + "ok"
    for k in range(1, len(text)):
        assert reader.streamed(text, [k], prompt) == ("why", "ok", [])


def test_without_a_tool_parser_calls_stay_as_they_are(tokenizer):
    """Some clients parse calls on their own."""
    text = block(invoke("g"))
    reader = Reader(tokenizer, tools=False)
    assert reader.every_way(think("why") + text) == ("why", text, [])


def test_without_a_reasoning_parser_think_blocks_stay(tokenizer):
    reader = Reader(tokenizer, reasoning=False)
    assert decoded(reader.every_way(think("a") + block(invoke("g")))) == (
        "",
        think("a"),
        [("g", {})],
    )


def test_calls_that_nobody_allowed_are_text(tokenizer):
    reader = Reader(tokenizer)
    expected = ("", 'a<invoke name="g"></invoke>', [])
    assert reader.every_way("a" + block(invoke("g")), tool_choice="none") == expected


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_forced_calls_use_the_same_syntax(choice, tokenizer):
    got = Reader(tokenizer).every_way(block(invoke("g")), tool_choice=choice)
    assert got == ("", "", [("g", "{}")])


def test_reasoning_is_left_out_when_not_asked_for(tokenizer):
    reader = Reader(tokenizer)
    text = think("why") + "ok"
    for k in range(1, len(text)):
        got = reader.streamed(text, [k], include_reasoning=False)
        assert got == ("", "ok", [])


def test_a_parser_reads_one_answer_after_another(tokenizer):
    reader = Reader(tokenizer)
    asked = request()
    parser = reader.parser_class(tokenizer, asked.tools)
    for _ in range(2):
        _, content, calls = parser.parse(f"a{NS}<tool_call>{HALF}", asked, True)
        assert (content, calls) == ('a<invoke name="f">', None)


@pytest.mark.parametrize(
    ("text", "cuts", "prompt", "wrong"),
    [
        ("a<b", [2], "", ("", "ab", [])),
        ("a" + think("r"), [1], "", ("", "a" + think("r"), [])),
        (think("r") + "b", [1], think("earlier"), ("", think("r") + "b", [])),
        (f"{HALF}{NS}<n>1", None, "", None),
    ],
)
def test_why_vllms_own_pair_is_not_used(text, cuts, prompt, wrong, tokenizer):
    """The smallest inputs on which it loses a character, leaks a marker or makes up a call."""
    reader = Reader(tokenizer, upstream=True)
    if cuts is None:
        _, _, calls = reader.whole(f"{NS}<tool_call>{text}")
        assert calls == [("f", "{}")]
    else:
        assert reader.streamed(text, cuts, reader.tokens(prompt) or (1,)) == wrong


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", True),
        (" \n", True),
        (element("a", element("b", "1"), "mixed"), True),
        (element("a", "1") + " x", False),
        ("x" + element("a", "1"), False),
        (f"{NS}<a>1{NS}</b>", False),
        (f"{NS}</a>", False),
        (f"{NS}<a>1", False),
        (element("", "1"), False),
        (f"{NS}<a>1{NS}{NS}</a>", False),
        (f"{NS}<a>" * 128 + f"{NS}</a>" * 128, True),
        (f"{NS}<a>" * 129 + f"{NS}</a>" * 129, False),
    ],
)
def test_well_formed(body, expected):
    assert well_formed(body) is expected


def test_vllm_reads_all_of_what_is_well_formed():
    """Else a call would come with some of its arguments."""
    from vllm.parser.minimax_m3 import _parse_invoke_params

    rng = random.Random(11)
    parts = (NS, f"{NS}<a>", f"{NS}</a>", f"{NS}<b>", f"{NS}</b>", "x", " ", f"{NS}<>", "<", ">")
    whole = 0
    for _ in range(20000):
        body = "".join(rng.choice(parts) for _ in range(rng.randrange(9)))
        names = [name for name, _ in _parse_invoke_params(body)]
        if well_formed(body):
            whole += 1
            assert names == top_elements(body), body
    assert whole > 1000


def top_elements(body: str) -> list[str]:
    """Names of the outermost elements of a well-formed body."""
    names, depth = [], 0
    for tag in re.findall(re.escape(NS) + r"<(/?\w+)>", body):
        if tag.startswith("/"):
            depth -= 1
            continue
        names += [tag] if depth == 0 else []
        depth += 1
    return names


def test_other_parsers_are_left_alone(tokenizer):
    from vllm.parser.parser_manager import ParserManager

    from rocm_msa.vllm_plugin.parsers import M3Parser

    ours = ParserManager.get_parser(reasoning_parser_name="minimax_m3")
    assert issubclass(ours, M3Parser)
    for names in (("hermes", "minimax_m3"), (None, "minimax_m2"), ("hermes", None)):
        other = ParserManager.get_parser(names[0], names[1], enable_auto_tools=True)
        assert not issubclass(other, M3Parser)
    assert ParserManager.get_parser() is None

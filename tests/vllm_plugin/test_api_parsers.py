"""Scripted answers over HTTP: what a client of /v1/chat/completions gets, streamed and whole.

Each script of test_parsers.py is cut in two at every character, streamed a character a step (so
markers come as plain text, not as their tokens), and asked for whole. The answer is the same each
time, its calls' arguments are JSON, no marker is in content or reasoning, and finish_reason tells
calls from text.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rocm_msa.vllm_plugin import compat
from tests.vllm_plugin import vllm_033
from tests.vllm_plugin.scripted import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Api,
    Message,
    Script,
    events,
)
from tests.vllm_plugin.test_parsers import (
    CASES,
    NS,
    TOOLS,
    block,
    element,
    invoke,
    no_marker,
    think,
)

SERVE = ("--reasoning-parser", "minimax_m3", "--tool-call-parser", "minimax_m3")
AUTO = "--enable-auto-tool-choice"
CALL = block(invoke("f", element("path", "a/b"), element("n", "3")))
CALLED = ("f", {"path": "a/b", "n": 3})


@pytest.fixture(scope="module")
def api(checkpoint):
    one = Api(checkpoint, *SERVE, AUTO)
    yield one
    one.close()


def checked(message: Message) -> tuple:
    """(reasoning, content, calls with their arguments read, finish_reason); no marker is left."""
    assert no_marker(message.content), message
    assert no_marker(message.reasoning), message
    calls = [(name, arguments_of(text)) for name, text in message.calls]
    return message.reasoning, message.content, calls, message.finish


def arguments_of(text: str) -> dict:
    """JSON as every client reads it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"not JSON: {constant} in {text}")

    return json.loads(text, parse_constant=refuse)


def every_way(api: Api, text: str, end: str = "stop", step: int = 7, **body) -> tuple:
    """What the ways of cutting `text` give, in two at every `step`-th character."""
    body = {"tools": TOOLS, **body}
    whole = checked(api.chat(Script([text], end), False, **body))
    cuts = [Script([text[:k], text[k:]], end) for k in range(1, len(text), step)]
    for script in (*cuts, Script(list(text), end), Script([text], end)):
        got = checked(api.chat(script, True, **body))
        assert got == whole, f"{list(script.pieces)}: {got}, whole: {whole}"
    return whole


EVERY = [7, pytest.param(1, marks=pytest.mark.slow)]
"""Steps: every seventh character, no marker is that short; in the slow set every one."""


@pytest.mark.parametrize("step", EVERY)
@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_an_answer_is_the_same_however_it_is_cut(text, expected, step, api):
    finish = "tool_calls" if expected[2] else "stop"
    assert every_way(api, text, step=step) == (*expected, finish)


def test_thinking_that_the_prompt_opened(api):
    body = {"chat_template_kwargs": {"thinking_mode": "enabled"}}
    expected = ("why", "ok", [CALLED], "tool_calls")
    assert every_way(api, "why</mm:think>ok" + CALL, **body) == expected
    assert every_way(api, "why</mm:think>ok", **body) == ("why", "ok", [], "stop")


@pytest.mark.parametrize(
    "earlier",
    [
        {"role": "system", "content": "Think inside <mm:think> and </mm:think>."},
        {"role": "assistant", "content": think("before") + "answer"},
        {"role": "assistant", "content": "answer", "reasoning_content": "before"},
        {"role": "user", "content": f"{NS}<tool_call> means a call, <mm:think> a thought"},
    ],
)
@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
@pytest.mark.parametrize("step", EVERY)
def test_markers_in_the_prompt_say_nothing_about_the_answer(earlier, thinking, step, api):
    """A leading closer, and a whole think block, after prompts that hold markers themselves."""
    messages = [earlier, {"role": "user", "content": "x"}]
    body = {"messages": messages, "chat_template_kwargs": {"thinking_mode": thinking}}
    body["step"] = step
    assert every_way(api, "</mm:think>ok", **body) == ("", "ok", [], "stop")
    opened = "why</mm:think>ok" if thinking == "enabled" else think("why") + "ok"
    assert every_way(api, opened, **body) == ("why", "ok", [], "stop")


@pytest.mark.parametrize("step", EVERY)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_right_after_the_reasoning(choice, step, api):
    """The stream goes on after the closer, also when both come in one step."""
    expected = ("why", "", [CALLED], "tool_calls")
    assert every_way(api, think("why") + CALL, step=step, tool_choice=choice) == expected


def test_a_named_call_ends_as_openai_says(api):
    choice = {"type": "function", "function": {"name": "f"}}
    assert every_way(api, CALL, tool_choice=choice) == ("", "", [CALLED], "stop")


def test_calls_that_nobody_allowed_are_text(api):
    content = '<invoke name="f"><path>a/b</path><n>3</n></invoke>'
    assert every_way(api, CALL, tool_choice="none") == ("", content, [], "stop")
    assert every_way(api, CALL, tools=None)[2:] == ([], "stop")


@pytest.mark.parametrize("step", EVERY)
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_max_tokens_cuts_short(stream, step, api):
    """Text stays text, a call that is not whole is no call."""
    text = think("why") + "ok " + CALL
    whole = text.index("</invoke>") + len("</invoke>")
    for k in range(1, len(text), step):
        message = api.chat(Script([text[:k]], "length"), stream, tools=TOOLS)
        reasoning, content, calls, finish = checked(message)
        assert "why".startswith(reasoning) or reasoning.startswith("why")
        assert calls == ([CALLED] if k >= whole else [])
        # docs/serve_line.md: in 0.32 an answer that is not streamed and has a call ends otherwise.
        otherwise = calls and not stream and compat.version() == (0, 32)
        assert finish == ("tool_calls" if otherwise else "length")
        if k >= whole:
            assert content == "ok "


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("stop", "expected"), [("o", ("why", "g")), ("</mm:think>", ("why", "")), ("hy<", ("w", ""))]
)
def test_a_stop_string_of_the_client(stop, expected, stream, api):
    """Also one that is a marker, or ends within one."""
    text = think("why") + "go on"
    for k in range(1, len(text)):
        script = Script([text[:k], text[k:]])
        got = checked(api.chat(script, stream, tools=TOOLS, stop=[stop]))
        assert got == (*expected, [], "stop"), k


def test_reasoning_is_left_out_when_not_asked_for(api):
    got = every_way(api, think("why") + "ok" + CALL, include_reasoning=False)
    assert got == ("", "ok", [CALLED], "tool_calls")


@pytest.mark.parametrize("stream", [True, False])
def test_a_required_call_that_did_not_come(stream, api):
    message = api.chat(Script(["no"]), stream, tools=TOOLS, tool_choice="required")
    finish = "tool_calls" if not stream and compat.version() == (0, 32) else "stop"
    assert checked(message) == ("", "no", [], finish)  # docs/serve_line.md says so


@pytest.mark.parametrize("stream", [True, False])
def test_one_call_where_parallel_calls_are_not_allowed(stream, api):
    text = block(invoke("g"), invoke("f", element("n", "1")))
    got = api.chat(Script([text]), stream, tools=TOOLS, parallel_tool_calls=False)
    assert checked(got) == ("", "", [("g", {})], "tool_calls")


@pytest.mark.parametrize("stream", [True, False])
def test_every_choice_has_a_parser_of_its_own(stream, api):
    text = think("why") + "ok" + CALL
    script = Script([text[:20], text[20:]])
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "n": 3}
    status, answer = api.post(CHAT, body | {"stream": stream}, script)
    assert status == 200
    answers = events(answer) if stream else [json.loads(answer)]
    content = dict.fromkeys(range(3), "")
    finish = {}
    for choice in (choice for one in answers for choice in one["choices"]):
        part = choice["delta" if stream else "message"]
        content[choice["index"]] += part.get("content") or ""
        finish[choice["index"]] = choice["finish_reason"]
    assert content == dict.fromkeys(range(3), "ok")
    assert finish == dict.fromkeys(range(3), "tool_calls")


SCHEMAS = {
    "no parameters": None,
    "no properties": {"type": "object"},
    "properties of no kind": {"type": "object", "properties": {"n": 5}},
    "unknown type": {"type": "object", "properties": {"n": {"type": "other"}}},
    "several types": {"type": "object", "properties": {"n": {"type": ["integer", "null"]}}},
    "any of": {"type": "object", "properties": {"n": {"anyOf": [{"type": "integer"}, {}]}}},
    "reference": {"type": "object", "properties": {"n": {"$ref": "#/$defs/none"}}},
    "reference to itself": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "items of no kind": {"type": "object", "properties": {"n": {"type": "array", "items": 5}}},
    "properties as a list": {"type": "object", "properties": ["n"]},
    "any number of things": {"type": "object", "properties": {"n": {"anyOf": 5}}},
    "object of no kind": {"type": "object", "properties": {"n": {"properties": ["item"]}}},
    "number": {"type": "object", "properties": {"n": {"type": "number"}}},
    "enum": {"type": "object", "properties": {"n": {"enum": [1, "a"]}}},
    "boolean schema": {"type": "object", "properties": {"n": True}},
}
VALUES = ("3", "", "x", "[1", "null", "1e999", "NaN", element("item", "1") + element("item", "2"))


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_strange_schema_is_no_error(schema, stream, api):
    """Where the schema does not say what a value is, the call still comes, with JSON arguments."""
    function = {"name": "f"} | ({"parameters": schema} if schema is not None else {})
    tools = [{"type": "function", "function": function}]
    for value in VALUES:
        script = Script([block(invoke("f", element("n", value)))])
        message = api.chat(script, stream, tools=tools)
        (called,) = checked(message)[2]
        assert called[0] == "f" and set(called[1]) == {"n"}, message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SERVE[2:], ("", think("why") + "ok", [CALLED], "tool_calls")),
        (SERVE[:2], ("why", "ok" + CALL, [], "stop")),
    ],
    ids=["no reasoning parser", "no tool parser"],
)
def test_with_one_of_the_parsers(options, expected, checkpoint):
    api = Api(checkpoint, *options, *([AUTO] if expected[2] else []))
    try:
        text = think("why") + "ok" + CALL
        tools = TOOLS if expected[2] else None
        for k in range(1, len(text), 7):
            for stream in (True, False):
                got = api.chat(Script([text[:k], text[k:]]), stream, tools=tools)
                calls = [(name, arguments_of(arguments)) for name, arguments in got.calls]
                assert (got.reasoning, got.content, calls, got.finish) == expected
    finally:
        api.close()


def of_messages(answer: str, stream: bool) -> tuple:
    """(thinking, text, calls) of an answer in Anthropic's form."""
    blocks: list[dict] = []
    if not stream:
        blocks = json.loads(answer)["content"]
    for line in answer.splitlines() if stream else ():
        event = json.loads(line[6:]) if line.startswith("data: {") else {}
        if event.get("type") == "content_block_start":
            blocks.append(dict(event["content_block"], input=""))
        if event.get("type") == "content_block_delta":
            for key, value in event["delta"].items():
                name = "input" if key == "partial_json" else key
                if name != "type":
                    blocks[event["index"]][name] = blocks[event["index"]].get(name, "") + value
    thinking = "".join(block.get("thinking") or "" for block in blocks)
    text = "".join(block.get("text") or "" for block in blocks)
    called = [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
    if stream:
        called = [(name, arguments_of(arguments)) for name, arguments in called]
    return thinking, text, called


def of_responses(answer: str, stream: bool) -> tuple:
    """(reasoning, text, calls) of an answer of /v1/responses; a stream's deltas make its end."""
    if not stream:
        output = json.loads(answer)["output"]
        deltas = None
    else:
        found = [json.loads(line[6:]) for line in answer.splitlines() if line[:7] == "data: {"]
        output = found[-1]["response"]["output"]
        deltas = {
            kind: "".join(e["delta"] for e in found if e["type"] == f"response.{kind}.delta")
            for kind in ("reasoning_text", "output_text")
        }
    of_type: dict[str, list] = {"reasoning": [], "message": [], "function_call": []}
    for item in output:
        of_type[item["type"]].append(item)
    reasoning = "".join(part["text"] for item in of_type["reasoning"] for part in item["content"])
    text = "".join(part["text"] for item in of_type["message"] for part in item["content"])
    called = [(item["name"], arguments_of(item["arguments"])) for item in of_type["function_call"]]
    if deltas is not None:
        assert deltas == {"reasoning_text": reasoning, "output_text": text}
    return reasoning, text, called


@pytest.mark.parametrize("step", EVERY)
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_the_other_apis_read_answers_alike(path, step, api):
    function = TOOLS[0]["function"]
    if path == MESSAGES:
        tool = {"name": "f", "input_schema": function["parameters"]}
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 900, "tools": [tool]}
        read = of_messages
    else:
        body = {"input": "x", "tools": [{"type": "function", **function}]}
        read = of_responses
    text = think("why") + "ok" + CALL
    scripts = [Script([text[:k], text[k:]]) for k in range(1, len(text), step)]
    for script in (*scripts, Script(list(text)), Script([text])):
        for stream in (True, False):
            status, answer = api.post(path, body | {"stream": stream}, script)
            assert status == 200, answer
            assert read(answer, stream) == ("why", "ok", [CALLED]), list(script.pieces)


@pytest.mark.slow
def test_the_api_of_033_answers_alike():
    """The quick tests of this file, with 0.33's server."""
    command = [sys.executable, vllm_033.__file__, "-m", "pytest", "-q", "-x", __file__]
    done = subprocess.run(
        [*command, "-m", "not slow", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        timeout=1700,
        env=vllm_033.environment(),
        cwd=vllm_033.ROOT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]

"""One parser for MiniMax-M3 output: reasoning, content and tool calls in a single pass.

vLLM composes a reasoning parser and a tool parser and hands text from the first to the second. At
that hand-over it loses a character that might begin a marker, and it finds a `<mm:think>` block
only when that block comes first. Here vLLM's own parser engine reads both kinds of marker in one
state machine, and a tool call counts only when it is whole:

- a marker never reaches the content, however the text is cut into deltas;
- a call that is cut short or malformed comes back as text without its markers, not as a call with
  some of its arguments;
- streamed and whole answers are equal.

Structured output and token counts stay with vLLM's own two parsers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.parser.abstract_parser import DelegatingParser, Parser
from vllm.parser.engine.events import EventType, SemanticEvent
from vllm.parser.engine.parser_engine_config import ParserEngineConfig, ParserState, Transition
from vllm.parser.metrics import record_tool_parser_invocation
from vllm.parser.minimax_m3 import (
    MAX_ELEMENT_DEPTH,
    NAMESPACE,
    MinimaxM3Parser,
    _minimax_m3_arg_converter,
    minimax_m3_config,
)

THINK = {"THINK_START": "<mm:think>", "THINK_END": "</mm:think>"}
_QUOTES = ("DQ", "SQ", "UNQUOTED")
_NO_SCHEMA = (AttributeError, KeyError, TypeError, ValueError, RecursionError)
"""What vLLM raises where a tool's parameters are no JSON schema; vLLM accepts such a request."""
_TAG = re.compile(re.escape(NAMESPACE) + r"<(/?)([^<>]*)>")


@functools.cache
def config(reasoning: bool, tools: bool, thinking: bool) -> ParserEngineConfig:
    """The state machine.

    Args:
        reasoning: think blocks are separated; otherwise their markers are content.
        tools: tool calls are separated; otherwise their markers are content.
        thinking: the prompt opened a think block already.
    """
    own = minimax_m3_config()
    terminals, transitions = {}, {}
    if reasoning:
        content, inside = ParserState.CONTENT, ParserState.REASONING
        terminals |= THINK
        transitions |= {
            (content, "THINK_START"): Transition(inside, (EventType.REASONING_START,)),
            (inside, "THINK_START"): Transition(inside),
            (inside, "THINK_END"): Transition(content, (EventType.REASONING_END,)),
            (content, "THINK_END"): Transition(content),
        }
    if tools:
        terminals |= {**own.terminals, "NAMESPACE": NAMESPACE}
        transitions |= own.transitions
        for stray in ("TOOL_END", "INVOKE_END", "NAMESPACE"):
            transitions[ParserState.CONTENT, stray] = Transition(ParserState.CONTENT)
        for quote in _QUOTES:
            # A call without its <tool_call>.
            transitions[ParserState.CONTENT, f"INVOKE_PREFIX_{quote}"] = Transition(
                ParserState.TOOL_NAME, (EventType.TOOL_CALL_START,)
            )
            # The end of the name is a call's first argument chunk: `_take_call` takes it off.
            transitions[ParserState.TOOL_NAME, f"NAME_END_{quote}"] = Transition(
                ParserState.TOOL_ARGS, (EventType.ARG_VALUE_CHUNK,)
            )
    return replace(
        own,
        initial_state=ParserState.REASONING if reasoning and thinking else ParserState.CONTENT,
        terminals=terminals,
        transitions=transitions,
        # Text before the first <invoke is a TOOL_NAME without a call: `_whole_calls` looks at it.
        content_events={**own.content_events, ParserState.TOOL_PREAMBLE: EventType.TOOL_NAME},
        strip_trailing_reasoning_whitespace=False,
    )


def well_formed(body: str) -> bool:
    """Whether an <invoke>'s body is a sequence of closed elements, as deep as vLLM reads them."""
    open_tags: list[str] = []
    end = 0
    for tag in _TAG.finditer(body):
        if not open_tags and body[end : tag.start()].strip():
            return False
        end = tag.end()
        if not tag[1]:
            open_tags.append(tag[2])
            if len(open_tags) > MAX_ELEMENT_DEPTH:
                return False
        elif not open_tags or open_tags.pop() != tag[2]:
            return False
        if not tag[2].strip():
            return False
    rest = body[end:]
    return not open_tags and not rest.strip() and body.count(NAMESPACE) == len(_TAG.findall(body))


class M3Engine(MinimaxM3Parser):
    """vLLM's engine on `config`, with calls held back until they are whole."""

    calls_allowed = True

    def __init__(self, tokenizer, tools=None, **kwargs) -> None:
        self._forget()
        super().__init__(tokenizer, tools, **kwargs)

    def _forget(self) -> None:
        self._open: list[SemanticEvent] | None = None
        self._preamble = ""
        self._calls = 0

    def _reset(self, initial_state: ParserState | None = None) -> None:
        super()._reset(initial_state=initial_state)
        self._forget()

    def _check_skip_tool_parsing(self, request) -> None:
        self._tools = getattr(request, "tools", None) or self._tools

    def _convert_args(self, raw_args: str, partial: bool) -> str:
        try:
            return super()._convert_args(raw_args, partial)
        except _NO_SCHEMA:
            return _minimax_m3_arg_converter(raw_args, partial)

    def _fix_arg_types(self, args_json: str, func_name: str) -> str:
        try:
            return super()._fix_arg_types(args_json, func_name)
        except _NO_SCHEMA:
            return args_json

    @staticmethod
    def _streamable_string_keys(properties: object) -> set[str] | None:
        """None: arguments come whole, so no value is cut while it is streamed."""
        return None

    def _events_to_delta(
        self, events: list[SemanticEvent], finished: bool = False
    ) -> DeltaMessage | None:
        delta = super()._events_to_delta(self._whole_calls(events, finished), finished)
        if finished and self._deferred_content:
            delta = delta or DeltaMessage()
            delta.content = (delta.content or "") + self._deferred_content
            self._deferred_content = ""
        return delta

    def _whole_calls(self, events: list[SemanticEvent], finished: bool) -> list[SemanticEvent]:
        """The events with whole calls together and all else of tool blocks as text."""
        result: list[SemanticEvent] = []
        for event in events:
            match event.type:
                case EventType.TOOL_CALL_START:
                    result += self._take_preamble()
                    self._open = [event]
                case EventType.TOOL_NAME if self._open is None:
                    self._preamble += event.value
                case EventType.TOOL_NAME | EventType.ARG_VALUE_CHUNK:
                    self._open.append(event)
                case EventType.TOOL_CALL_END:
                    result += self._take_call(event)
                case _:
                    result.append(event)
        return result + self._take_preamble() if finished else result

    def _take_preamble(self) -> list[SemanticEvent]:
        text, self._preamble = self._preamble, ""
        return _text(text) if text.strip() else []

    def _take_call(self, end: SemanticEvent) -> list[SemanticEvent]:
        """The open call, which `end` closes; the end of the output closes with an empty value."""
        if self._open is None:
            return []
        (start, *parts), self._open = self._open, None
        names = [part for part in parts if part.type is EventType.TOOL_NAME]
        arguments = parts[len(names) + 1 :]
        named = "".join(part.value for part in names).strip()
        whole = end.value and named and well_formed("".join(part.value for part in arguments))
        if whole and self.calls_allowed:
            index, self._calls = self._calls, self._calls + 1
            return [replace(part, tool_index=index) for part in (start, *names, *arguments, end)]
        return _text("".join(part.value for part in (start, *parts, end)))


def _text(text: str) -> list[SemanticEvent]:
    return [SemanticEvent(EventType.TEXT_CHUNK, text.replace(NAMESPACE, ""))]


class M3Parser(DelegatingParser):
    """What vLLM's serving layer holds for a request."""

    def __init__(self, tokenizer, tools=None, *args, model_config=None, **kwargs) -> None:
        super().__init__(tokenizer, tools, *args, model_config=model_config, **kwargs)
        template = kwargs.get("chat_template_kwargs") or {}
        self._whole = M3Engine(
            tokenizer,
            tools,
            model_config=model_config,
            parser_engine_config=config(
                self._reasoning_parser is not None,
                self._tool_parser is not None,
                template.get("thinking_mode") == "enabled",
            ),
        )

    def parse(
        self,
        model_output: str,
        request,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ):
        """(reasoning, content, tool calls) of a whole answer."""
        self._whole.calls_allowed = enable_auto_tools and request.tool_choice != "none"
        answer = self._whole.parse(model_output, request, enable_auto_tools, model_output_token_ids)
        self._count(bool(answer[2]), False, request)
        return answer

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """What one delta adds to the answer."""
        self._whole.calls_allowed = request.tool_choice != "none"
        delta = self._whole.parse_delta(
            delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
        )
        self._count(bool(delta and delta.tool_calls), True, request)
        return delta

    def _count(self, called: bool, streaming: bool, request) -> None:
        """For `vllm:tool_call_parser_invocations_total`, as vLLM's pair counts."""
        if self._tool_parser is not None:
            record_tool_parser_invocation(
                is_tool_called=called, is_streaming=streaming, request=request
            )


def single_pass(composed: type[Parser]) -> type[Parser]:
    """The class that takes the place of `composed`, vLLM's pair of M3 parsers."""
    return type(
        M3Parser.__name__,
        (M3Parser,),
        {
            "reasoning_parser_cls": composed.reasoning_parser_cls,
            "tool_parser_cls": composed.tool_parser_cls,
            "tool_strict_level": composed.tool_strict_level,
        },
    )

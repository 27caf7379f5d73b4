"""vLLM's HTTP server in this process over an engine whose answers are scripted.

All of the front end is vLLM's own: routes, chat template, input processing, detokenizer, parsers,
answers. Only the engine core is replaced: it answers every request with the pieces of a script, one
piece a step, and waits with the next until the server has taken the last.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
MODEL = "scripted"


@dataclass(frozen=True)
class Script:
    """One answer of the model: the text of each step, and how it ends (`stop` or `length`)."""

    pieces: Sequence[str]
    end: str = "stop"


class ScriptedCore:
    """In the place of vLLM's EngineCoreClient."""

    def __init__(self, tokenizer: Any, eos: int):
        self.tokenizer, self.eos = tokenizer, eos
        self.script = Script(())
        self.running: dict[str, Iterator] = {}
        self.started = asyncio.Event()
        self.prompts: list[list[int]] = []
        self.states: dict[str, Any] = {}
        self.resources = SimpleNamespace(engine_dead=False)

    async def add_request_async(self, request: Any) -> None:
        self.prompts.append(request.prompt_token_ids)
        self.running[request.request_id] = self._steps(request.request_id, self.script)
        self.started.set()

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    async def get_output_async(self) -> Any:
        from vllm.v1.engine import EngineCoreOutputs

        while True:
            await self.started.wait()
            # A piece that the server has not taken yet would be joined with the next one.
            while any(self._untaken(request_id) for request_id in self.running):
                await asyncio.sleep(0)
            outputs = []
            for request_id, steps in list(self.running.items()):
                output = next(steps)
                if output.finish_reason is not None:
                    del self.running[request_id]
                outputs.append(output)
            if not self.running:
                self.started.clear()
            if outputs:
                return EngineCoreOutputs(outputs=outputs)

    def _untaken(self, request_id: str) -> bool:
        state = self.states.get(request_id)
        return state is not None and state.queue.output is not None

    def _steps(self, request_id: str, script: Script) -> Iterator:
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        steps = [self.tokenizer.encode(p, add_special_tokens=False) for p in script.pieces]
        if script.end == "stop":
            steps.append([self.eos])
        for i, tokens in enumerate(steps):
            reason = FinishReason[script.end.upper()] if i == len(steps) - 1 else None
            yield EngineCoreOutput(request_id, tokens, finish_reason=reason)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    def shutdown(self, timeout: float | None = None) -> None:
        self.running.clear()


@dataclass
class Message:
    """An answer as a client puts it together."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str | None = None


class Api:
    """The server of one checkpoint; `options` are added to the serve line."""

    def __init__(self, checkpoint: str, *options: str):
        self.loop = asyncio.new_event_loop()
        self.core: ScriptedCore | None = None
        self.run(self._start(checkpoint, options))

    def run(self, work: Coroutine) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 600))

    async def _start(self, checkpoint: str, options: Sequence[str]) -> None:
        import httpx
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.plugins import load_general_plugins
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.core_client import EngineCoreClient

        try:
            from vllm.entrypoints.common.cli_args import make_arg_parser  # 0.33
        except ImportError:
            from vllm.entrypoints.launchers.cli_args import make_arg_parser
        load_general_plugins()
        line = ["--model", checkpoint, "--served-model-name", MODEL, "--block-size", "128"]
        line += ["--kv-cache-dtype", "nvfp4", "--disable-log-stats", *options]
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()

        def core(*args: Any, renderer: Any, **kwargs: Any) -> ScriptedCore:
            tokenizer = renderer.tokenizer
            self.core = ScriptedCore(tokenizer, tokenizer.convert_tokens_to_ids("[e~["))
            return self.core

        real = EngineCoreClient.make_async_mp_client
        EngineCoreClient.make_async_mp_client = staticmethod(core)
        try:
            self.engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        finally:
            EngineCoreClient.make_async_mp_client = real
        self.core.states = self.engine.output_processor.request_states
        app = build_app(args, ("generate",), config.model_config)
        await init_app_state(self.engine, app.state, args, ("generate",))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")

    def close(self) -> None:
        async def end() -> None:
            await self.client.aclose()
            self.engine.shutdown()
            self.engine.output_handler.cancel()
            await asyncio.gather(self.engine.output_handler, return_exceptions=True)

        self.run(end())
        self.loop.close()

    def post(self, path: str, body: dict, script: Script) -> tuple[int, str]:
        """(status, body) of the answer to a request that the model answers with `script`."""
        self.core.script = script
        response = self.run(self.client.post(path, json={"model": MODEL, **body}))
        return response.status_code, response.text

    def chat(self, script: Script, stream: bool, **body: Any) -> Message:
        """A chat request's answer; AssertionError for an error or a stream out of order."""
        body = {"messages": [{"role": "user", "content": "x"}], "stream": stream, **body}
        status, text = self.post(CHAT, body, script)
        assert status == 200, text
        return _streamed(text) if stream else _whole(json.loads(text))


def events(text: str) -> list[dict]:
    """The events of a stream, which must end with [DONE]."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines and lines.pop() == "[DONE]", text
    return [json.loads(line) for line in lines]


def _whole(answer: dict) -> Message:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return Message(
        message.get("reasoning") or "",
        message["content"] or "",
        [(call["name"], call["arguments"]) for call in calls],
        choice["finish_reason"],
    )


def _streamed(text: str) -> Message:
    message, calls = Message(), []
    for event in events(text):
        assert "error" not in event, event
        for choice in event["choices"]:
            assert message.finish is None, f"an event after the last one: {event}"
            delta = choice["delta"]
            message.reasoning += delta.get("reasoning") or ""
            message.content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(calls):
                    assert call["id"] and call["type"] == "function", call
                    calls.append(["", ""])
                function = call.get("function") or {}
                calls[call["index"]][0] += function.get("name") or ""
                calls[call["index"]][1] += function.get("arguments") or ""
            message.finish = choice.get("finish_reason")
    message.calls = [tuple(call) for call in calls]
    return message

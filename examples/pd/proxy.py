"""A small proxy in front of prefill and decode engines: one OpenAI request, two engines.

    client -> proxy -> prefill engine   (max_tokens 1; answers with kv_transfer_params)
                    -> decode engine    (the same request with these parameters; its answer goes on)

python proxy.py --port 8000 --prefill http://A:8100 [--prefill ...] --decode http://B:8200 [...]

Engines take turns. When no prefill engine answers, the decode engine computes the prompt itself
(`--on-prefill-failure fail` answers 502 instead). A client that goes away ends its request on both.
It speaks the parameters of vLLM's NIXL connector (pull mode) and needs only aiohttp.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import time
import uuid
from typing import Any

import aiohttp
from aiohttp import web

logger = logging.getLogger("pd-proxy")

PATHS = ("/v1/completions", "/v1/chat/completions")
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)
ASK_TO_KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Of no use to the one token that the prefill engine makes, or in its way.
NOT_FOR_PREFILL = (
    "stream",
    "stream_options",
    "min_tokens",
    "n",
    "best_of",
    "max_completion_tokens",
)


class Proxy:
    """The handlers. `prefill` and `decode` are base URLs."""

    def __init__(self, prefill: list[str], decode: list[str], fail: bool):
        self.prefill, self.decode, self.fail = prefill, decode, fail
        self._next_prefill = itertools.cycle(range(len(prefill)))
        self._next_decode = itertools.cycle(decode)
        self.session: aiohttp.ClientSession | None = None

    async def open(self, app: web.Application):
        self.session = aiohttp.ClientSession(timeout=TIMEOUT, trust_env=False)
        yield
        await self.session.close()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """One request through both engines."""
        try:
            body = await request.json()
        except json.JSONDecodeError as error:
            return _error(400, f"body: expected JSON, got {error}")
        problem = _problem(body)
        if problem:
            return _error(400, problem)
        headers = {"X-Request-Id": request.headers.get("X-Request-Id", uuid.uuid4().hex)}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        answer = await self._keep(request.path, body, headers)
        if isinstance(answer, web.Response):
            return answer
        if answer is None and self.fail:
            return _error(502, "no prefill engine answered")
        if answer is not None:
            body = body | {"kv_transfer_params": answer}
        return await self._pass_on(request, body, headers)

    async def _keep(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | web.Response | None:
        """Prefill: parameters of the blocks, a refusal of the request itself, or None."""
        body = {k: v for k, v in body.items() if k not in NOT_FOR_PREFILL}
        body |= {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK_TO_KEEP}
        start = next(self._next_prefill)
        for turn in range(len(self.prefill)):
            url = self.prefill[(start + turn) % len(self.prefill)]
            begun = time.monotonic()
            try:
                async with self.session.post(url + path, json=body, headers=headers) as response:
                    if 400 <= response.status < 500:
                        return web.Response(
                            status=response.status,
                            body=await response.read(),
                            content_type=response.content_type,
                        )
                    response.raise_for_status()
                    params = (await response.json()).get("kv_transfer_params")
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                logger.warning("prefill engine %s: %s: %s", url, type(error).__name__, error)
                continue
            logger.info(
                "request %s: prefilled by %s in %.3f s",
                headers["X-Request-Id"],
                url,
                time.monotonic() - begun,
            )
            return params
        return None

    async def _pass_on(
        self, request: web.Request, body: dict[str, Any], headers: dict[str, str]
    ) -> web.StreamResponse:
        """Decode: its answer, piece by piece."""
        url = next(self._next_decode)
        try:
            async with self.session.post(url + request.path, json=body, headers=headers) as source:
                target = web.StreamResponse(
                    status=source.status,
                    headers={"Content-Type": source.headers.get("Content-Type", "text/plain")},
                )
                await target.prepare(request)
                async for piece in source.content.iter_any():
                    await target.write(piece)
                await target.write_eof()
                return target
        except aiohttp.ClientConnectorError as error:
            return _error(502, f"decode engine {url}: {error}")

    async def health(self, request: web.Request) -> web.Response:
        """200 when a decode engine is healthy, and which engines are not."""
        sick = {url for url in (*self.prefill, *self.decode) if not await self._healthy(url)}
        status = 503 if sick.issuperset(self.decode) else 200
        return web.json_response({"unhealthy": sorted(sick)}, status=status)

    async def models(self, request: web.Request) -> web.Response:
        async with self.session.get(self.decode[0] + "/v1/models") as response:
            return web.json_response(await response.json(), status=response.status)

    async def _healthy(self, url: str) -> bool:
        try:
            limit = aiohttp.ClientTimeout(total=2)
            async with self.session.get(url + "/health", timeout=limit) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


def _problem(body: Any) -> str | None:
    """Why a body cannot be served here."""
    if not isinstance(body, dict):
        return "body: expected a JSON object"
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    if several:
        return f"prompt: expected one prompt a request, got {len(prompt)}"
    if body.get("kv_transfer_params"):
        return "kv_transfer_params: set by this proxy, not by its clients"
    return None


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "proxy_error", "code": status}
    return web.json_response({"error": error}, status=status)


def application(prefill: list[str], decode: list[str], fail: bool = False) -> web.Application:
    proxy = Proxy([u.rstrip("/") for u in prefill], [u.rstrip("/") for u in decode], fail)
    app = web.Application(client_max_size=64 * 2**20)
    app.cleanup_ctx.append(proxy.open)
    for path in PATHS:
        app.router.add_post(path, proxy.generate)
    app.router.add_get("/health", proxy.health)
    app.router.add_get("/v1/models", proxy.models)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--on-prefill-failure", choices=("recompute", "fail"), default="recompute")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    app = application(args.prefill, args.decode, args.on_prefill_failure == "fail")
    # A client that goes away cancels the handler, which closes the connection to the engine.
    web.run_app(app, host=args.host, port=args.port, handler_cancellation=True, print=None)


if __name__ == "__main__":
    main()

"""The demo's requests and what it prints about them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from rocm_msa.cache.dtype import CacheDType
from rocm_msa.capacity import CacheDTypes, KVCache
from rocm_msa.cli.console import table
from rocm_msa.config import BLOCK_TOKENS, ModelConfig
from rocm_msa.demo.client import Answer, Client
from rocm_msa.demo.prepare import KV_CACHE_BYTES
from rocm_msa.demo.server import DemoError

CHAT_TOKENS = 48
LONG_PROMPT_TOKENS, LONG_ANSWER_TOKENS = 3000, 24
CONCURRENT_TOKENS = 32
_TEXT = (
    "A block is one hundred and twenty-eight tokens. For each query the index keys score the "
    "blocks, the best sixteen are kept, and attention reads the keys and values of these alone. "
)
_QUESTIONS = (
    "What is a block?",
    "Name a colour.",
    "Count to five.",
    "Who are you?",
    "What is four plus four?",
    "Say something short.",
    "Where does a river end?",
    "What comes after night?",
)


def streaming_chat(client: Client, console: Console) -> None:
    """A chat request whose tokens are printed as they come."""
    _heading(console, "1. A streaming chat request")
    console.print("The weights are random: the answer is real output and means nothing.")
    console.print("> Hello, who are you?\n< ", end="", markup=False)

    def show(text: str) -> None:
        clean = "".join(c if c.isprintable() else " " for c in text)
        console.file.write(clean)
        console.file.flush()

    answer = client.chat("Hello, who are you?", CHAT_TOKENS, show)
    console.print()
    _rates(console, answer)


def long_prompt(client: Client, directory: Path, console: Console) -> None:
    """A prompt of more blocks than the selection keeps."""
    model = ModelConfig.from_json(directory)
    blocks = -(-LONG_PROMPT_TOKENS // BLOCK_TOKENS)
    _heading(console, f"2. A prompt of {LONG_PROMPT_TOKENS:,} tokens")
    console.print(
        f"{blocks} blocks of {BLOCK_TOKENS}: each of the {model.num_sparse_layers} sparse layers "
        f"keeps {model.topk_blocks} of them for a query at the end."
    )
    ids = client.tokenize(_TEXT)
    prompt = (ids * (LONG_PROMPT_TOKENS // len(ids) + 1))[:LONG_PROMPT_TOKENS]
    answer = client.complete(prompt, LONG_ANSWER_TOKENS)
    if answer.prompt_tokens != LONG_PROMPT_TOKENS:
        raise DemoError(
            f"sent {LONG_PROMPT_TOKENS} prompt tokens, the server counted {answer.prompt_tokens}"
        )
    console.print(f"< {_one_line(answer.text)}", markup=False)
    _rates(console, answer)


def concurrent(client: Client, count: int, console: Console) -> None:
    """`count` requests at once, batched by the server."""
    _heading(console, f"3. {count} requests at once")
    questions = [_QUESTIONS[i % len(_QUESTIONS)] for i in range(count)]
    pool = ThreadPoolExecutor(count)
    start = time.monotonic()
    try:
        futures = [
            pool.submit(client.chat, question, CONCURRENT_TOKENS, lambda text: None)
            for question in questions
        ]
        answers = [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    total = time.monotonic() - start
    for question, answer in zip(questions, answers, strict=True):
        console.print(f"> {question:<24} < {_one_line(answer.text, 44)}", markup=False)
    tokens = sum(answer.tokens for answer in answers)
    console.print(
        f"{tokens} tokens generated in {total:.2f} s: {tokens / total:.1f} tokens/s over all "
        f"{count} requests."
    )


def capacity(info: Mapping[str, str], directory: Path, console: Console) -> None:
    """The server's KV cache beside what bf16 and FP8 would hold in the same memory."""
    _heading(console, "4. The KV cache of this server")
    model = ModelConfig.from_json(directory)
    served = int(info["num_gpu_blocks"])
    if info.get("cache_dtype") != CacheDType.NVFP4.value:
        raise DemoError(f"the server's cache_dtype is {info.get('cache_dtype')}, expected nvfp4")
    rows = table("cache", "row, B", "blocks", "tokens", "against bf16", "source", left=1)
    caches = [KVCache.of(model, CacheDTypes.parse(name)) for name in ("bf16", "fp8", "nvfp4")]
    base = caches[0].block_bytes
    for cache in caches:
        blocks, source = KV_CACHE_BYTES // cache.block_bytes, "computed"
        if cache.dtypes.main is CacheDType.NVFP4:
            if blocks != served:
                raise DemoError(
                    f"the server has {served} blocks of KV cache; {KV_CACHE_BYTES} bytes of "
                    f"{cache.block_bytes} B a block make {blocks}"
                )
            source = "the server"
        rows.add_row(
            cache.dtypes.name,
            f"{cache.block_bytes:,}",
            f"{blocks:,}",
            f"{blocks * BLOCK_TOKENS:,}",
            f"{base / cache.block_bytes:.2f}x",
            source,
        )
    console.print(f"{KV_CACHE_BYTES // 2**20} MiB; row: one block of every layer, main and index.")
    console.print(rows)
    console.print("For MiniMax-M3 itself on GPUs: rocm-msa capacity --explain")


def _heading(console: Console, text: str) -> None:
    console.print(f"\n{text}", style="bold", markup=False)


def _one_line(text: str, limit: int = 74) -> str:
    flat = "".join(c if c.isprintable() else " " for c in text)
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def _rates(console: Console, answer: Answer) -> None:
    """Client's clock. Decoding: the tokens after the first over the time after the first."""
    after = answer.total_s - answer.first_token_s
    decode = f"{(answer.tokens - 1) / after:.1f} tokens/s" if after > 0 else "not measurable"
    console.print(
        f"{answer.prompt_tokens:,} prompt tokens, first token after {answer.first_token_s:.2f} s "
        f"({answer.prompt_tokens / answer.first_token_s:,.0f} prompt tokens/s); "
        f"{answer.tokens} generated, then {decode}."
    )

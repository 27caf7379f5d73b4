"""Command lines through vLLM's own `serve` parser into its configuration; for both versions.

`python serve_lines.py CHECKPOINT` prints the outcome of every line of `LINES` as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

PUBLIC = {
    "-tp": "4",
    "--reasoning-parser": "minimax_m3",
    "--block-size": "128",
    "--kv-cache-dtype": "nvfp4",
    "--attention-config": '{"indexer_kv_dtype": "nvfp4", "indexer_decode_cp": true}',
    "--quantization-config.moe": "mxfp8",
    "--speculative-config": '{"method": "ngram", "num_speculative_tokens": 3, '
    '"prompt_lookup_max": 3}',
    "--disable-hybrid-kv-cache-manager": None,
}
"""The public command; its draft is n-gram, the method that needs no second checkpoint."""

TOOLS = {"--tool-call-parser": "minimax_m3", "--enable-auto-tool-choice": None}

LINES: dict[str, tuple[dict, bool]] = {
    "public": (PUBLIC, True),
    "with tools": ({**PUBLIC, **TOOLS}, False),
    "dotted": (
        {
            **{k: v for k, v in PUBLIC.items() if k != "--attention-config"},
            "--attention-config.indexer_kv_dtype": "fp8",
            "--attention-config.indexer_decode_cp": "true",
        },
        False,
    ),
    "unknown attention key": ({"--attention-config": '{"indexer_kv_dtyp": "nvfp4"}'}, False),
    "unknown MoE weights": ({**PUBLIC, "--quantization-config.moe": "mxfp9"}, True),
    "unknown parser": ({**PUBLIC, "--reasoning-parser": "minimax_m9"}, True),
    "unknown draft": ({**PUBLIC, "--speculative-config": '{"method": "oracle"}'}, True),
}
"""name -> (flags, whether vLLM's whole configuration is made of them)."""


def arguments(flags: dict[str, str | None]) -> list[str]:
    return [part for name, value in flags.items() for part in (name, value) if part is not None]


def outcome(checkpoint: str, flags: dict, configure: bool) -> dict:
    """What became of the line: fields of the configuration, or the error."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common import cli_args  # 0.33
    except ImportError:
        from vllm.entrypoints.launchers import cli_args
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    said = io.StringIO()  # argparse's message; its exception has none
    try:
        with contextlib.redirect_stderr(said):
            parsed = parser.parse_args(["--model", checkpoint, *arguments(flags)])
        cli_args.validate_parsed_serve_args(parsed)
        args = AsyncEngineArgs.from_cli_args(parsed)
        made = args.create_engine_config() if configure else None
    except (SystemExit, Exception) as error:
        return {"error": f"{type(error).__name__}: {error} {said.getvalue()}"}
    attention = args.attention_config
    result = {
        "tp": args.tensor_parallel_size,
        "block_size": args.block_size,
        "kv_cache_dtype": args.kv_cache_dtype,
        "indexer_kv_dtype": attention.indexer_kv_dtype,
        "indexer_decode_cp": attention.indexer_decode_cp,
        "moe": str(args.quantization_config.moe) if args.quantization_config else None,
        "draft": args.speculative_config and args.speculative_config["method"],
        "one_manager": args.disable_hybrid_kv_cache_manager,
        "reasoning_parser": parsed.reasoning_parser,
        "tool_parser": parsed.tool_call_parser,
    }
    if made is not None:
        result["made"] = {
            "tp": made.parallel_config.tensor_parallel_size,
            "block_size": made.cache_config.block_size,
            "draft": made.speculative_config and made.speculative_config.method,
            "drafts": made.speculative_config and made.speculative_config.num_speculative_tokens,
            "one_manager": made.scheduler_config.disable_hybrid_kv_cache_manager,
        }
    return result


def outcomes(checkpoint: str) -> dict[str, dict]:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return {name: outcome(checkpoint, *line) for name, line in LINES.items()}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = outcomes(sys.argv[1])
    print(json.dumps(found))

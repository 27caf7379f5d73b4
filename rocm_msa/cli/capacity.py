"""`rocm-msa capacity`: how many sequences fit, and why. Computed from the config, not measured."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rocm_msa.arch import GFX950
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.capacity import (
    MINIMAX_M3,
    RESERVED_BLOCKS,
    WEIGHT_DTYPES,
    CacheDTypes,
    Fit,
    KVCache,
    Memory,
    Section,
    explain,
    weight_terms,
)
from rocm_msa.cli.console import out, table, user_errors
from rocm_msa.config import BLOCK_TOKENS, ModelConfig
from rocm_msa.errors import expect

GIB = 2**30
GPUS = {"mi355x": GFX950.hbm_bytes}
"""GPU name -> bytes of its memory (datasheet)."""

COMPARED = ("bf16", "fp8", "nvfp4")
DEFAULT_CONTEXT = 131072
PLOT_CONTEXTS = tuple(2**k for k in range(13, 31))


@user_errors
def capacity(
    model: Annotated[
        Path | None,
        typer.Option(help="config.json or its directory. Default: the public MiniMax-M3 geometry."),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="Main cache: nvfp4, fp8 or bf16.")] = "nvfp4",
    indexer_kv_dtype: Annotated[str, typer.Option(help="Index cache: the same names.")] = "nvfp4",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks (GPUs).")] = 4,
    gpu: Annotated[str | None, typer.Option(help=f"Known: {', '.join(GPUS)} (default).")] = None,
    memory_gib: Annotated[
        float | None, typer.Option(help="Memory of a GPU, in place of --gpu.")
    ] = None,
    weights_gib: Annotated[
        float | None, typer.Option(help="Weights on a GPU. Default: estimated from the config.")
    ] = None,
    weight_dtype: Annotated[
        str, typer.Option(help=f"For the estimate: {', '.join(WEIGHT_DTYPES)}.")
    ] = "nvfp4",
    mono: Annotated[
        bool,
        typer.Option(
            "--mono",
            help="Count the mono kernel's copy of the weights: in the formats of --model's "
            "quantization_config, or else of --weight-dtype.",
        ),
    ] = False,
    reserve_gib: Annotated[
        float, typer.Option(help="Activations and runtime on a GPU; an assumption.")
    ] = 8.0,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share vLLM may use.")] = 0.9,
    context: Annotated[
        list[str] | None,
        typer.Option(help="Tokens a sequence, e.g. 131072 or 128K; several: again or with commas."),
    ] = None,
    explain_terms: Annotated[
        bool, typer.Option("--explain", help="Every term and formula.")
    ] = False,
    row: Annotated[bool, typer.Option("--row", help="The outer-block row, page by page.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a plot (.png, .svg, .pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON in place of tables.")] = False,
) -> None:
    """Sequences that fit in the KV memory, for the chosen cache dtypes beside FP8 and bf16."""
    geometry = MINIMAX_M3 if model is None else ModelConfig.from_json(model)
    chosen = KVCache.of(geometry, _dtypes(kv_cache_dtype, indexer_kv_dtype), tp)
    caches = _compared(chosen)
    total = _memory_bytes(gpu, memory_gib)
    estimate = weight_terms(geometry, chosen.rank, weight_dtype)
    weights = (
        sum(t.nbytes for t in estimate)
        if weights_gib is None
        else _gib("--weights-gib", weights_gib)
    )
    again = _mono_bytes(geometry, tp, model, weight_dtype) if mono else 0
    reserve = _gib("--reserve-gib", reserve_gib)
    memory = Memory(total, gpu_memory_utilization, weights, reserve, again)
    contexts = _contexts(context) or [DEFAULT_CONTEXT]
    fits = [[cache.fit(memory.kv_bytes, c) for c in contexts] for cache in caches]
    if plot is not None:
        _plot(plot, caches, memory)
    source = "given" if weights_gib is not None else f"estimate, {weight_dtype} layout"
    if as_json:
        payload = _payload(caches, fits, memory, source)
        if explain_terms:
            payload["explain"] = [_section(s) for s in explain(chosen)]
            payload["weights_estimate"] = [vars(term) for term in estimate]
        if row:
            payload["row"] = [vars(region) for region in chosen.row]
        typer.echo(json.dumps(payload, indent=2))
        return
    _print_fits(caches, fits, memory, source)
    if explain_terms:
        for section in explain(chosen):
            _print_section(section)
        if weights_gib is None:
            title = f"Weights of one rank, estimated ({weight_dtype} layout)"
            _print_section(Section(title, estimate, "weights on one rank"))
    if row:
        _print_row(chosen)
    if plot is not None:
        out().print(f"Plot written to {plot}", markup=False)


def _mono_bytes(geometry: ModelConfig, tp: int, model: Path | None, weight_dtype: str) -> int:
    """What a rank packs for the mono kernel, all layers."""
    from mono_kernel.checkpoint_formats import LAYOUTS, mono_layers
    from mono_kernel.shapes import Shape
    from mono_kernel.weights import weight_layout
    from rocm_msa.cli.compile import formats_of_model

    formats = None if model is None else formats_of_model(model, geometry)
    if formats is None or formats.routed == "bf16":
        formats = LAYOUTS.get(weight_dtype)
    if formats is None:
        wanted = expect("--weight-dtype", f"one of {sorted(LAYOUTS)}", repr(weight_dtype))
        raise ValueError(f"--mono: {wanted}")
    return len(mono_layers(geometry)) * weight_layout(Shape.of(geometry, tp, formats)).nbytes


def _dtypes(main: str, index: str) -> CacheDTypes:
    parsed = []
    for flag, name in (("--kv-cache-dtype", main), ("--indexer-kv-dtype", index)):
        try:
            parsed.append(CacheDType.parse(name))
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from None
    return CacheDTypes(*parsed)


def _contexts(given: Sequence[str] | None) -> list[int]:
    """`["8192,128K", "1M"]` -> tokens; K is 1,024 and M 1,048,576."""
    out = []
    for text in ",".join(given or ()).split(","):
        digits = text.strip().upper()
        unit = {"K": 2**10, "M": 2**20}.get(digits[-1:], 1)
        digits = digits.rstrip("KM") if unit > 1 else digits
        if text and not digits.isdigit():
            raise ValueError(expect("--context", "tokens such as 131072, 128K or 1M", repr(text)))
        out += [int(digits) * unit] if text else []
    return out


def _compared(chosen: KVCache) -> list[KVCache]:
    """bf16, FP8 and NVFP4 for both caches, and the chosen pair when it is none of these."""
    pairs = [CacheDTypes.parse(name) for name in COMPARED]
    if chosen.dtypes not in pairs:
        pairs.append(chosen.dtypes)
    return [KVCache(chosen.model, chosen.rank, pair) for pair in pairs]


def _memory_bytes(gpu: str | None, memory_gib: float | None) -> int:
    if memory_gib is not None:
        if gpu is not None:
            raise ValueError("--gpu, --memory-gib: give one of the two")
        return _gib("--memory-gib", memory_gib)
    name = (gpu or "mi355x").lower()
    if name not in GPUS:
        raise ValueError(expect("--gpu", f"one of {sorted(GPUS)} (or --memory-gib)", repr(gpu)))
    return GPUS[name]


def _gib(flag: str, value: float) -> int:
    if not math.isfinite(value):
        raise ValueError(expect(flag, "a finite number", value))
    return int(value * GIB)


def _print_fits(
    caches: Sequence[KVCache], fits: Sequence[Sequence[Fit]], memory: Memory, source: str
) -> None:
    console, tp = out(), caches[0].rank.tp
    console.print(f"Memory of one GPU, GiB (tensor parallel {tp}; computed, nothing measured)")
    budget = table("", "", "GiB", left=2)
    for term in memory.terms():
        formula = f"{term.formula} ({source})" if term.name == "weights" else term.formula
        budget.add_row(term.name, formula, f"{term.nbytes / GIB:,.1f}")
    console.print(budget)
    console.print(f"What the KV cache holds (blocks of {BLOCK_TOKENS} tokens)")
    rows = table("cache", "B a token", "row, B", "blocks", "tokens", "context", "fit")
    for cache, row in zip(caches, fits, strict=True):
        for i, fit in enumerate(row):
            head = [
                cache.dtypes.name,
                f"{cache.token_bytes:,}",
                f"{cache.block_bytes:,}",
                f"{fit.blocks:,}",
                f"{fit.tokens:,}",
            ]
            rows.add_row(*(head if i == 0 else [""] * 5), f"{fit.context:,}", f"{fit.sequences:,}")
    console.print(rows)
    console.print(
        "cache: dtype of the main and index caches; B a token and row: bytes on one rank,\n"
        "every layer's K, V and index key.\n"
        "fit: whole sequences of that context at a time; prefix sharing would add to it.\n"
        f"{RESERVED_BLOCKS} block is vLLM's own padding block and is not in tokens or fit."
    )


def _print_section(section: Section) -> None:
    rows = table("term", "formula", "bytes", left=2, title=section.title)
    for term in section.terms:
        rows.add_row(term.name, term.formula, f"{term.nbytes:,}")
    if section.total:
        rows.add_section()
        rows.add_row(section.total, "sum", f"{section.nbytes:,}")
    out().print(rows)


def _print_row(cache: KVCache) -> None:
    rows = table("page", "offset", "bytes", title="Outer-block row: one block on one rank, bytes")
    for region in cache.row:
        rows.add_row(region.name, f"{region.offset:,}", f"{region.nbytes:,}")
    rows.add_section()
    rows.add_row("end of the row", f"{cache.row.nbytes:,}", "")
    out().print(rows)


def _section(section: Section) -> dict[str, Any]:
    terms = [vars(term) for term in section.terms]
    return {
        "title": section.title,
        "terms": terms,
        "sum": section.nbytes if section.total else None,
    }


def _payload(
    caches: Sequence[KVCache], fits: Sequence[Sequence[Fit]], memory: Memory, source: str
) -> dict[str, Any]:
    def one(fit: Fit) -> dict[str, int]:
        return {
            "context": fit.context,
            "blocks_per_sequence": fit.blocks_per_sequence,
            "sequences": fit.sequences,
        }

    return {
        "tensor_parallel_size": caches[0].rank.tp,
        "weights": source,
        "memory": [vars(term) for term in memory.terms()],
        "mono_weight_bytes": memory.mono,
        "caches": [
            {
                "main": cache.dtypes.main.value,
                "index": cache.dtypes.index.value,
                "token_bytes": cache.token_bytes,
                "row_bytes": cache.block_bytes,
                "main_token_bytes_whole_model": cache.once_main_token_bytes,
                "blocks": row[0].blocks,
                "tokens": row[0].tokens,
                "fits": [one(fit) for fit in row],
            }
            for cache, row in zip(caches, fits, strict=True)
        ],
    }


def _plot(path: Path, caches: Sequence[KVCache], memory: Memory) -> None:
    """Sequences that fit against context, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    limit = caches[0].model.rope.max_position
    contexts = [c for c in PLOT_CONTEXTS if c <= limit] or [limit]
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    try:
        for cache in caches:
            sequences = [cache.fit(memory.kv_bytes, c).sequences for c in contexts]
            axes.plot(contexts, sequences, marker="o", label=cache.dtypes.name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(contexts, [_tokens(c) for c in contexts])
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("sequences that fit")
        size = f"{memory.kv_bytes / GIB:,.0f} GiB of KV cache a GPU"
        axes.set_title(f"TP {caches[0].rank.tp}, {size} (computed)")
        axes.grid(alpha=0.3)
        axes.legend(title="caches")
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise OSError(f"--plot {path}: cannot be written: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)


def _tokens(count: int) -> str:
    return f"{count // 2**20}M" if count >= 2**20 else f"{count // 2**10}K"

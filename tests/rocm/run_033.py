"""Our plugin on vLLM 0.33's own ROCm platform and model runner V2, as JSON; no GPU.

    python tests/rocm/run_033.py CHECKPOINT [QUANTISED_CHECKPOINT ...]

vLLM is 0.33's sources with nothing compiled; amdsmi and torch.cuda are fakes (fake_rocm.py). The
configuration, the model's making and loading, the caches and the batch's metadata are made by
vLLM's code for ROCm. No layer is run: there is nothing to run it on.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.rocm import fake_rocm  # noqa: E402
from tests.vllm_plugin import serve_lines, vllm_033  # noqa: E402

CACHE_BYTES = 64 * 2**20
BATCHES = {
    "decode": [(1, 300), (1, 128), (1, 129)],
    "mixed": [(1, 300), (1, 5), (40, 40), (200, 700)],
    "prefill": [(128, 128), (1, 1)],
}
"""name -> (query tokens, sequence length) of each request, in the runner's order."""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def prepare() -> None:
    """Fakes, then 0.33 in the place of the installed vLLM, and our plugin."""
    fake_rocm.install()
    version, folder = vllm_033.sources()
    installed = importlib.metadata.version
    importlib.metadata.version = lambda name: version if name == "vllm" else installed(name)
    sys.path.insert(0, str(folder))
    os.environ["VLLM_CACHE_ROOT"] = tempfile.mkdtemp()  # it keeps facts of model classes
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    registry._run_in_subprocess = lambda work: work()  # another process would have no fakes


def configure(checkpoint: str, **options):
    from vllm.engine.arg_utils import AsyncEngineArgs

    defaults = {
        "block_size": 128,
        "kv_cache_dtype": "nvfp4",
        "attention_config": {"indexer_kv_dtype": "nvfp4"},
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "dtype": "bfloat16",
    }
    return AsyncEngineArgs(model=checkpoint, **(defaults | options)).create_engine_config()


def refusal(checkpoint: str, environment: dict[str, str] | None = None, **options) -> str:
    """The message against a configuration, "" when it is accepted."""
    before = dict(os.environ)
    os.environ.update(environment or {})
    try:
        configure(checkpoint, **options)
    except Exception as error:
        return str(error)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return ""


def platform(config) -> dict:
    from vllm.platforms import current_platform

    compilation = config.compilation_config
    return {
        "platform": type(current_platform).__name__,
        "is_rocm": current_platform.is_rocm(),
        "capability": list(current_platform.get_device_capability()),
        "runner_v2": config.use_v2_model_runner,
        "compilation": compilation.mode.name,
        "graphs": compilation.cudagraph_mode.name,
        "block_size": config.cache_config.block_size,
        "device": config.device_config.device_type,
    }


def build(config, checkpoint: str):
    """The model as a ROCm worker makes and loads it; (model, what is known of it)."""
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
    from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

    from rocm_msa.vllm_plugin.model import RocmMsaM3ForCausalLM

    if not model_parallel_is_initialized():
        store = f"file://{tempfile.mkdtemp()}/store"
        init_distributed_environment(1, 0, store, 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1, backend="gloo")
    model = RocmMsaM3ForCausalLM(vllm_config=config)
    files = sorted(map(str, Path(checkpoint).glob("*.safetensors")))
    loaded = model.load_weights(safetensors_weights_iterator(files, False))
    names = {name for name, _ in model.named_parameters()}
    return model, {
        "class": type(model).__name__,
        "parameters": len(names),
        "not_loaded": sorted(names - loaded),
        "experts": sorted({type(m).__name__ for m in model.modules() if "Expert" in str(type(m))}),
        "state": resolve_model_state_cls(config, model).__name__,
    }


def caches(config, model) -> tuple[object, list, dict]:
    """What runner V2 makes of the layers' specs: (cache config, attention groups, facts)."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec, init_attn_backend, init_kv_cache

    specs = get_kv_cache_spec(config)
    backends = get_current_attn_backends(config)
    layouts = [[layout.name for layout in get_supported_kv_cache_layouts(backends)]]
    layout = resolve_kv_cache_layout(config, layouts, specs.values())
    groups = get_global_kv_cache_groups(config, [specs])
    (cache_config,) = get_kv_cache_configs(config, [specs], [CACHE_BYTES], groups)
    cache_config.kv_cache_layout = layout.name
    device = torch.device("cpu")
    attention, support, sizes = init_attn_backend(cache_config, config, device)
    layers = config.compilation_config.static_forward_context
    init_kv_cache(layers, cache_config, device, sizes, config)
    pages = {name: layer.cache.pages for name, layer in layers.items() if hasattr(layer, "cache")}
    facts = {
        "layout": layout.name,
        "groups": len(cache_config.kv_cache_groups),
        "blocks": cache_config.num_blocks,
        "kernel_block_sizes": sizes,
        "graphs": support.min_cg_support.name,
        "layers": {name: list(view.shape) for name, view in pages.items()},
        "block_strides": sorted({view.stride(0) * view.element_size() for view in pages.values()}),
        "block_bytes": model.serving.block_bytes,
        "allocations": len({view.untyped_storage().data_ptr() for view in pages.values()}),
    }
    return cache_config, attention, facts


def batch(requests: list[tuple[int, int]], cache_config, attention) -> dict:
    """The metadata that runner V2's own code has our builder make of a batch."""
    import torch
    from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

    starts = torch.tensor([0, *torch.tensor([q for q, _ in requests]).cumsum(0)], dtype=torch.int32)
    lengths = torch.tensor([n for _, n in requests], dtype=torch.int32)
    spare = 4  # rows of the runner's buffers that no request has
    table = torch.arange((len(requests) + spare) * 16, dtype=torch.int32).view(-1, 16)
    metadata = build_attn_metadata(
        attn_groups=attention,
        num_reqs=len(requests),
        num_tokens=int(starts[-1]),
        query_start_loc_gpu=starts,
        query_start_loc_cpu=starts,
        max_query_len=max(q for q, _ in requests),
        seq_lens=torch.cat([lengths, torch.zeros(spare, dtype=torch.int32)]),
        max_seq_len=int(lengths.max()),
        block_tables=(table,),
        slot_mappings=torch.zeros(1, int(starts[-1]), dtype=torch.int64),
        kv_cache_config=cache_config,
        seq_lens_cpu_upper_bound=lengths,
    )
    made = {id(one): one for one in metadata.values()}
    names = sorted(metadata)
    found = [
        {"decode": _part(one.decode), "prefill": _part(one.prefill), "tokens": one.num_tokens}
        for one in made.values()
    ]
    assert all(one == found[0] for one in found)
    return {"layers": names, **found[0]}


def _part(part) -> dict | None:
    return part and {
        "tokens": [part.tokens.start, part.tokens.stop],
        "rows": part.rows_per_request,
        "seq_lens": part.seq_lens.tolist(),
        "starts": part.cu_seqlens_q.tolist(),
        "table": part.block_table.tolist(),
        "last_blocks": [part.num_blocks[i - 1].item() for i in part.cu_seqlens_q[1:].tolist()],
    }


def quantised(checkpoint: str) -> dict:
    """A quantised checkpoint through vLLM's own quantisation code for ROCm, up to the loading."""
    from vllm.config import set_current_vllm_config

    config = configure(checkpoint)
    with set_current_vllm_config(config):
        model, facts = build(config, checkpoint)
    methods = {type(m.quant_method).__name__ for m in model.modules() if hasattr(m, "quant_method")}
    return {**facts, "quantization": config.model_config.quantization, "methods": sorted(methods)}


def order() -> dict[str, list[int]]:
    """Query tokens of a step's requests in runner V2's order, without and with 3 draft tokens."""
    from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

    plain = {"a": 600, "b": 1, "c": 40, "d": 1}
    drafted = {"a": 600, "b": 4, "c": 1, "d": 4, "e": 3}
    drafts = {"b": [0] * 3, "d": [0] * 3, "e": [0] * 2}
    return {
        "plain": [plain[name] for name in sort_batch_req_ids(plain, {}, 1)],
        "drafted": [drafted[name] for name in sort_batch_req_ids(drafted, drafts, 4)],
    }


def outcomes(checkpoint: str, *others: str) -> dict:
    from vllm.config import set_current_vllm_config

    from tests.rocm import graphs_033

    config = configure(checkpoint)
    found = {"platform": platform(config), "order": order()}
    found["modes"] = graphs_033.modes(configure, refusal, checkpoint)
    found["refusals"] = {
        "aiter": refusal(checkpoint, {"VLLM_ROCM_USE_AITER": "1"}),
        "attention_backend": refusal(checkpoint, attention_backend="ROCM_ATTN"),
        "quantization": refusal(checkpoint, quantization_config={"moe": "mxfp8"}),
        "block_size": refusal(checkpoint, block_size=64),
        "nothing": refusal(checkpoint),
    }
    with set_current_vllm_config(config):
        model, found["model"] = build(config, checkpoint)
        cache_config, attention, found["cache"] = caches(config, model)
        found["batches"] = {
            name: batch(requests, cache_config, attention) for name, requests in BATCHES.items()
        }
        found["resolved"] = graphs_033.resolved(config, attention)
        sizes = found["cache"]["kernel_block_sizes"]
        found["measured"] = graphs_033.measured(config, cache_config, sizes)
        found["graphs"] = graphs_033.steps(config, model, cache_config, attention, 1)
    drafting = configure(checkpoint, speculative_config=DRAFTS)
    with set_current_vllm_config(drafting):
        drafting, attention = graphs_033.with_drafts(drafting, config, cache_config)
        found["drafts"] = graphs_033.steps(drafting, model, cache_config, attention, 4)
    public = {**serve_lines.PUBLIC, "-tp": "2"}  # the tiny model has two KV heads
    found["public"] = {
        Path(other).name: serve_lines.outcome(other, public, True) for other in others
    }
    found["quantised"] = {Path(other).name: quantised(other) for other in others}
    return found


if __name__ == "__main__":
    stdout = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints
    prepare()
    os.write(stdout, json.dumps(outcomes(*sys.argv[1:])).encode())

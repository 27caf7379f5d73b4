"""Graphs of decode steps by vLLM 0.33's own code for ROCm: configuration, manager, dispatch.

torch.cuda's graphs are recorded (tests/vllm_plugin/recorded_graph.py). The layers are stand-ins
that read what ours read of a step, since there is nothing to run them on; the model around them,
metadata, state and counting are the product's.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch

from tests.vllm_plugin.graph_engine import Request, Steps

SIZES = [1, 2, 4, 8, 10, 16, 24]


def modes(configure, refusal, checkpoint: str) -> dict:
    """What becomes of compilation options: the mode of graphs, or the refusal."""
    options = {
        "default": {},
        "eager": {"enforce_eager": True},
        "O0": {"optimization_level": 0},
        "O3": {"optimization_level": 3},
        "none": {"compilation_config": {"cudagraph_mode": "NONE"}},
        "both": {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
        "triton": {"additional_config": {"rocm_msa": {"backend": "triton"}}},
        "reference": {"additional_config": {"rocm_msa": {"backend": "reference"}}},
    }
    refused = {
        "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
        "full": {"compilation_config": {"cudagraph_mode": "FULL"}},
        "compiled": {"compilation_config": {"mode": 3}},
    }
    found = {}
    for name, more in options.items():
        compilation = configure(checkpoint, **more).compilation_config
        found[name] = [compilation.mode.name, compilation.cudagraph_mode.name]
    return found | {name: refusal(checkpoint, **more) for name, more in refused.items()}


def resolved(config, attention) -> str:
    """The mode that runner V2 settles on with our builders, drafts included."""
    from vllm.v1.worker.gpu.attn_utils import get_attn_cg_support

    support = get_attn_cg_support(attention, config)
    return config.compilation_config.resolve_cudagraph_mode_and_sizes(
        support.min_cg_support,
        support.min_cg_attn_backend,
        4,
        use_v2_model_runner=True,
        piecewise_capture_available=False,
    ).name


def measured(config, cache_config, sizes: list[int]) -> dict:
    """Caches as the runner takes them away once it has measured graphs on them, and new ones."""
    from vllm.v1.worker.gpu.attn_utils import init_kv_cache
    from vllm.v1.worker.utils import clear_layer_kv_caches

    context = config.compilation_config.static_forward_context
    layers = {name: layer for name, layer in context.items() if hasattr(layer, "warm_up")}
    (warm_up,) = {layer.warm_up for layer in layers.values()}
    warmed = mock.Mock(wraps=warm_up._run)
    with mock.patch.object(warm_up, "_run", warmed):
        clear_layer_kv_caches(context.values())
        released = [layer.cache is None for layer in layers.values()]
        init_kv_cache(context, cache_config, torch.device("cpu"), sizes, config)
    return {
        "released": sum(released),
        "bound": all(layer.cache is not None for layer in layers.values()),
        "warm_ups": warmed.call_count,
    }


class Layer(torch.nn.Module):
    """Adds to each row its request's blocks, which the step's metadata gives."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, positions, hidden, residual):
        from vllm.forward_context import get_forward_context

        decode = get_forward_context().attn_metadata[self.name].decode
        hidden = hidden + decode.num_blocks[:, None]
        return hidden, hidden if residual is None else residual + hidden


def with_drafts(config, target, cache_config):
    """(configuration, attention groups) of the layers of `target` in an engine with drafts."""
    from vllm.v1.worker.gpu.attn_utils import init_attn_backend

    layers = target.compilation_config.static_forward_context
    config.compilation_config.static_forward_context = layers
    return config, init_attn_backend(cache_config, config, torch.device("cpu"))[0]


def steps(config, model, cache_config, attention, query: int) -> dict:
    """Capture by 0.33's manager, dispatch by its runner's function, replays.

    query: rows of a request, 1 + drafts.
    """
    from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp

    runner = SimpleNamespace(
        vllm_config=config,
        get_model=lambda: model,
        kv_cache_config=cache_config,
        attn_groups=attention,
    )
    ours = model.model
    names = [layer.self_attn.layer_name for layer in ours.layers]
    layers = torch.nn.ModuleList(Layer(name) for name in names)
    layers[0].self_attn = SimpleNamespace(decode_cp=None)
    norm = SimpleNamespace(forward=lambda hidden, residual: (hidden + residual, None))
    counted, calls = mock.Mock(wraps=ours.replays.replayed), []
    embed = lambda ids: calls.append(len(ids)) or ids[:, None].float().repeat(1, 4)  # noqa: E731
    with (
        mock.patch.object(ours, "layers", layers),
        mock.patch.object(ours.norm, "forward", norm.forward),
        mock.patch.object(ours.embed_tokens, "forward", embed),
        mock.patch.object(ours.replays, "replayed", counted),
    ):
        made = Steps(runner, SIZES, query)
        made.capture()
        captured = list(calls)
        found = {}
        for name, lengths in {"all": [300, 5, 140], "fewer": [129], "other": [2, 900]}.items():
            requests = [Request([9, 8, 7, 6, 5, 4, 3, 2], n, [n] * query) for n in lengths]
            chosen, _ = dispatch_cg_and_sync_dp(
                made.manager, len(lengths), len(lengths) * query, query, 1, 0, query
            )
            got, wanted = made.replayed(requests), made.eager(requests)
            found[name] = {
                "mode": chosen.cg_mode.name,
                "size": [chosen.num_reqs, chosen.num_tokens],
                "alike": torch.equal(got, wanted),
                "rows": got[:, 0].tolist(),
            }
        calls.clear()
        made.replayed([Request([1], 5, [3] * query)])
    return {
        "state": type(made.state).__name__,
        "graphs": made.graphs,
        "forwards": captured,
        "steps": found,
        "counted": counted.call_count,
        "python_in_a_replay": len(calls),
    }

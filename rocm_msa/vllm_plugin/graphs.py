"""Replaying captured decode steps: what a graph leaves to the host, which runs in every step.

vLLM captures a decode step once for each of its sizes: the model's Python runs, launches are
recorded, and later steps of that size replay them. Nothing in a graph may be read on the host,
uploaded or compiled: kernels.WarmUp has done that before, and what still comes first in a capture
is refused by name (launcher.refuse_capture). What the host does in every step is the metadata
builder's, which runs before each replay: it refreshes tensors in place and looks at error words.
What a step counts is noted when its graph is captured, and added at each replay.

The key of a graph is (requests, rows a request). The block table is as wide as `--max-model-len`
there, so that every choice by sizes (mono or ordinary layers, shared scan or not) is a function of
the key alone, the same on all ranks. Which configurations have graphs: graph_config.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.forward_context import get_forward_context

from rocm_msa import launcher
from rocm_msa.ops import dispatch
from rocm_msa.vllm_plugin import decode_cp, metrics, mono
from rocm_msa.vllm_plugin.metadata import MsaMetadata

if TYPE_CHECKING:
    import torch


def add_size(vllm_config: Any, most_rows: int) -> None:
    """Let vLLM capture a size that takes most of `most_rows` rows, where it pads beyond them.

    With 4 drafts vLLM's sizes are 5, 10, 20, ... rows, so that 3 requests, 15 rows, would become
    20 and be lost to the mono layers. The same on all ranks; before runner V2 makes its graphs.
    """
    compilation, speculative = vllm_config.compilation_config, vllm_config.speculative_config
    each = 1 + (speculative.num_speculative_tokens if speculative is not None else 0)
    size = most_rows // each * each
    sizes = compilation.cudagraph_capture_sizes or []
    rounded = {-(-tokens // each) * each for tokens in sizes}
    if size and size not in rounded and max(rounded, default=0) > size:
        compilation.cudagraph_capture_sizes = sorted([*sizes, size])


Key = tuple[int, int]
"""Requests, padded ones included, and rows of each."""


def key_of(metadata: MsaMetadata) -> Key | None:
    """Of the graph that could hold this step; None: a step with other rows than decode rows."""
    decode = metadata.decode
    if decode is None or metadata.prefill is not None:
        return None
    return decode.block_table.shape[0], decode.rows_per_request


class Replays:
    """What the steps of a model count that are replayed; the model holds it."""

    def __init__(self) -> None:
        self._counts: dict[Key, list[Counter]] = {}

    @contextlib.contextmanager
    def noted(self, device: torch.device) -> Iterator[None]:
        """Around the model's layers: in a capture, note what this step counts."""
        if not launcher.capturing(device):
            yield
            return
        (metadata,) = _ours(get_forward_context().attn_metadata)
        before = [counter.copy() for counter in _counters()]
        yield
        self._counts[key_of(metadata)] = [
            counter - old for counter, old in zip(_counters(), before, strict=True)
        ]
        metrics.serving_begins()  # what the capture compiled is not late

    def replayed(self, metadata: MsaMetadata) -> None:
        """Count a step whose graph is about to be replayed."""
        for counter, new in zip(_counters(), self._counts[key_of(metadata)], strict=True):
            counter.update(new)


def _counters() -> tuple[Counter, ...]:
    return dispatch.taken, dispatch.chosen, decode_cp.taken, mono.steps


def _ours(metadata: Any) -> list[MsaMetadata]:
    """The step's metadata of our attention layers, one of them; none of other layers'."""
    made = metadata.values() if isinstance(metadata, dict) else ()
    return [one for one in made if isinstance(one, MsaMetadata)][:1]


@functools.cache
def model_state_cls() -> type:
    """State class of vLLM's model runner V2: its own, which tells a model of its replays."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    class MsaModelState(DefaultModelState):
        def prepare_attn(self, input_batch, cudagraph_mode, *args, for_capture=False, **kwargs):
            """Metadata of a step; vLLM replays the graph next where the mode is FULL."""
            metadata = super().prepare_attn(
                input_batch, cudagraph_mode, *args, for_capture=for_capture, **kwargs
            )
            if cudagraph_mode == CUDAGraphMode.FULL and not for_capture:
                for one in _ours(metadata):
                    self._replays.replayed(one)
            return metadata

        @functools.cached_property
        def _replays(self) -> Replays:
            held = (getattr(module, "replays", None) for module in self.model.modules())
            return next(one for one in held if isinstance(one, Replays))

    return MsaModelState

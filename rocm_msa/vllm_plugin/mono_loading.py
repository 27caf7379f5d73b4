"""Weights of the mono layers, taken from the checkpoint's tensors as they pass by.

The ordinary layers keep their weights as vLLM's quantisation code arranges them, the mono kernel as
the checkpoint stores them, in its own tiles. So each rank looks at the stream that fills the
ordinary layers: the tensors of a layer are kept on the host until the layer is whole, then its
share is cut out, checked and packed, and they are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mono_kernel import reading
from rocm_msa.checkpoint.names import expected_tensors

if TYPE_CHECKING:
    from mono_kernel.shapes import Shape
    from rocm_msa.vllm_plugin.mono import Mono

logger = logging.getLogger("vllm.rocm_msa")

_UNUSED = ".input_scale"  # of an activation; the kernel takes activations as they are


class LayerCollector:
    """Collects whole layers for a rank.

    Args:
        config: the HF text config as a dict, with its `quantization_config`.
        layers: their numbers.
    """

    def __init__(self, mono: Mono, shape: Shape, rank: int, config: Mapping[str, Any]) -> None:
        self.mono, self.shape, self.rank = mono, shape, rank
        self.kept: dict[str, dict[str, torch.Tensor]] = {}
        self.missing: dict[str, set[str]] = {}
        self.numbers = {f"model.layers.{number}": number for number in mono.layers}
        for name in expected_tensors(config):
            prefix = ".".join(name.split(".")[:3])
            if prefix in self.numbers and not name.endswith(_UNUSED):
                self.missing.setdefault(prefix, set()).add(_plain(name))

    def watch(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors; those of a layer are copied until it is whole.

        Raises:
            ConfigError: tensors of a layer that do not fit, by name.
        """
        for name, tensor in weights:
            prefix = ".".join(name.split(".")[:3])
            if _plain(name) in self.missing.get(prefix, ()):
                # Loaders may use a tensor's memory again.
                self.kept.setdefault(prefix, {})[name] = tensor.clone()
                self.missing[prefix].remove(_plain(name))
                if not self.missing[prefix]:
                    self._take(prefix)
            yield name, tensor

    def finish(self) -> None:
        """Layers that are not whole are refused, with the names that are missing."""
        for prefix in [p for p, names in self.missing.items() if names]:
            self._take(prefix)

    def _take(self, prefix: str) -> None:
        tensors = self.kept.pop(prefix, {})
        self.mono.load(
            self.numbers[prefix], reading.read_layer(self.shape, self.rank, tensors, prefix)
        )


def _plain(name: str) -> str:
    """One spelling of the two that scales have."""
    return name.replace("weight_scale_inv", "weight_scale")

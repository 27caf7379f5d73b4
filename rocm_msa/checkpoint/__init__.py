"""Checkpoints: the tensor table, a maker of small ones, and safe reading."""

from __future__ import annotations

from rocm_msa.checkpoint.names import TensorSpec, check_tensors, expected_tensors
from rocm_msa.checkpoint.quantisation import LAYOUTS, quantisation_of
from rocm_msa.checkpoint.read import Checkpoint, dequantised_weights, open_checkpoint

__all__ = [
    "LAYOUTS",
    "Checkpoint",
    "TensorSpec",
    "check_tensors",
    "dequantised_weights",
    "expected_tensors",
    "open_checkpoint",
    "quantisation_of",
]

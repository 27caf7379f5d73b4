"""Attention backend and metadata of all our layers: dense, sparse and index cache alike.

The batch is decode-first (vLLM reorders it): `decode` covers requests that all bring the same
number of rows, 1 + speculative tokens; `prefill` covers the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from rocm_msa.config import BLOCK_TOKENS
from rocm_msa.vllm_plugin import compat


@dataclass
class Part:
    """Requests of one kind in a batch, with their tokens at `tokens` of the batch.

    block_table: int32 `[requests, max_blocks]`; seq_lens: int32 `[requests]`; cu_seqlens_q: int32
    `[requests + 1]`, from 0; num_blocks: int32 `[tokens]`, causal blocks of each row.
    """

    tokens: slice
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    num_blocks: torch.Tensor
    rows_per_request: int | None = None


@dataclass
class MsaMetadata(AttentionMetadata):
    """One step's batch; either part may be absent."""

    num_tokens: int
    decode: Part | None
    prefill: Part | None


class MsaMetadataBuilder(AttentionMetadataBuilder[MsaMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int = 1

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = vllm_config.compilation_config.static_forward_context
        shared = [getattr(layers[name], "decode_cp", None) for name in layer_names]
        self.decode_cp = next((d for d in shared if d is not None), None)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MsaMetadata:
        if self.decode_cp is not None:
            self.decode_cp.check()
        common = common_attn_metadata
        decodes, prefills, decode_tokens, prefill_tokens = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold, require_uniform=True
        )
        reach = max(1, -(-common.max_seq_len // BLOCK_TOKENS))
        table = common.block_table_tensor[:, :reach].to(torch.int32)
        starts = common.query_start_loc.to(torch.int32)
        seq_lens = common.seq_lens.to(torch.int32)
        decode = prefill = None
        if decodes:
            decode = _part(
                slice(0, decode_tokens),
                table[:decodes],
                seq_lens[:decodes],
                starts[: decodes + 1],
                rows_per_request=decode_tokens // decodes,
            )
        if prefills:
            requests = slice(decodes, decodes + prefills)
            prefill = _part(
                slice(decode_tokens, decode_tokens + prefill_tokens),
                table[requests],
                seq_lens[requests],
                starts[decodes : decodes + prefills + 1] - decode_tokens,
            )
        return MsaMetadata(common.num_actual_tokens, decode, prefill)


def _part(tokens, block_table, seq_lens, cu_seqlens_q, rows_per_request=None) -> Part:
    from rocm_msa.ops.rows import prefill_rows

    rows = prefill_rows(cu_seqlens_q, seq_lens, tokens.stop - tokens.start)
    num_blocks = rows.num_blocks.to(torch.int32)
    return Part(tokens, block_table, seq_lens, cu_seqlens_q, num_blocks, rows_per_request)


class MsaBackend(AttentionBackend):
    """Backend of every layer of the model; the layers themselves run the ops."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "nvfp4",
    ]

    @staticmethod
    def get_name() -> str:
        return "ROCM_MSA"

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError("the layers of rocm-msa run their ops themselves")

    @staticmethod
    def get_builder_cls() -> type[MsaMetadataBuilder]:
        return MsaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int]:
        return [BLOCK_TOKENS]

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls):
        return compat.outer_block_layouts()

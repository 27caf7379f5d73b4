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
from rocm_msa.errors import expect
from rocm_msa.ops.rows import prefill_rows
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
    """Runs in every step, also where a captured graph is replayed instead of the layers.

    Of decode rows the tables, lengths and starts are views of vLLM's own buffers and the block
    counts a buffer of ours, all at fixed addresses: what a graph has captured is refreshed.

    Attributes:
        num_blocks: int32 `[most decode rows]`. checks: what may have met a fault since.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int = 1

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        rows = vllm_config.scheduler_config.max_num_seqs * self.reorder_batch_threshold
        self.num_blocks = torch.zeros(rows, dtype=torch.int32, device=device)
        layers = vllm_config.compilation_config.static_forward_context
        shared = (
            getattr(layers[name], of, None) for of in ("decode_cp", "mono") for name in layer_names
        )
        self.checks = list({id(one): one for one in shared if one is not None}.values())

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MsaMetadata:
        """Metadata of a step; see MsaMetadata.

        Raises:
            DcpError, MonoError: of an earlier step, from whatever rank.
        """
        for one in self.checks:
            one.check()
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
            rows = decode_tokens // decodes
            decode = Part(
                slice(0, decode_tokens),
                table[:decodes],
                seq_lens[:decodes],
                starts[: decodes + 1],
                self._decode_blocks(seq_lens[:decodes], rows),
                rows,
            )
        if prefills:
            requests = slice(decodes, decodes + prefills)
            cu = starts[decodes : decodes + prefills + 1] - decode_tokens
            num_blocks = prefill_rows(cu, seq_lens[requests], prefill_tokens).num_blocks
            prefill = Part(
                slice(decode_tokens, decode_tokens + prefill_tokens),
                table[requests],
                seq_lens[requests],
                cu,
                num_blocks.to(torch.int32),
            )
        return MsaMetadata(common.num_actual_tokens, decode, prefill)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> MsaMetadata:
        """The same for a step that is captured.

        Raises:
            RuntimeError: a graph of it would not be refreshed: rows that are not decode rows, or
                tensors that `build` would have to copy.
        """
        common = common_attn_metadata
        metadata = self.build(0, common)
        decode = metadata.decode
        if decode is None or metadata.prefill is not None:
            got = f"queries of up to {common.max_query_len} tokens"
            raise RuntimeError(expect("captured step", "decode rows alone", got))
        for name, kept, given in (
            ("block_table_tensor", decode.block_table, common.block_table_tensor),
            ("seq_lens", decode.seq_lens, common.seq_lens),
            ("query_start_loc", decode.cu_seqlens_q, common.query_start_loc),
        ):
            if kept.data_ptr() != given.data_ptr():
                raise RuntimeError(expect(f"captured {name}.dtype", "torch.int32", given.dtype))
        return metadata

    def _decode_blocks(self, seq_lens: torch.Tensor, rows: int) -> torch.Tensor:
        """Causal blocks of each row, int32 `[requests * rows]`, in `num_blocks`; 0 for padding."""
        ahead = torch.arange(BLOCK_TOKENS - rows, BLOCK_TOKENS, device=seq_lens.device)
        out = self.num_blocks[: seq_lens.shape[0] * rows]
        blocks = (seq_lens[:, None] + ahead).clamp(min=0) // BLOCK_TOKENS
        return out.copy_(blocks.view(-1))


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
        return compat.cache_layouts()

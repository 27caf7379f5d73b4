"""vLLM plugin: serves MiniMax-M3 / M3.1 through rocm-msa's layers and caches.

`register` is the entry point of the group `vllm.general_plugins`; vLLM calls it in every process,
any number of times. It imports no torch of its own and touches vLLM only through `compat`.
"""

from __future__ import annotations


def register() -> None:
    """Register models, parsers, the KV connector, configuration hooks, `indexer_decode_cp`.

    Raises:
        RuntimeError: a vLLM version that this package was not written for.
    """
    from rocm_msa.vllm_plugin import compat

    compat.check_version()
    compat.share_log_handlers()
    compat.keep_numba_off_torch_threads()
    compat.add_attention_config_field()
    compat.register_config_class()
    compat.register_models()
    compat.register_kv_connector()
    compat.register_parsers()

"""Reading the HF config: typed look-up, RoPE keys, and the switches that are not implemented.

Every fault goes to a `Refusals` collector under the key's name; `config.py` raises them at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rocm_msa.errors import Refusals, expect

_SPARSE_KEYS = {
    "use_sparse_attention",
    "sparse_index_dim",
    "sparse_num_index_heads",
    "sparse_topk_blocks",
    "sparse_block_size",
    "sparse_disable_index_value",
    "sparse_score_type",
    "sparse_init_block",
    "sparse_local_block",
    "sparse_attention_freq",
}
_FUNCTIONAL_PREFIXES = ("sparse_", "index_", "indexer_", "swiglu_", "qk_", "rope_", "moe_")
_KNOWN_FUNCTIONAL_KEYS = {
    "sparse_attention_config",
    "swiglu_alpha",
    "swiglu_beta",
    "swiglu_limit",
    "qk_norm_type",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "moe_layer_freq",
}

_ROPE_KEYS = {
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    "rope_theta",
    "partial_rotary_factor",
}
_YARN_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "attention_factor": None, "truncate": True}
"""Further YaRN parameters: read, and refused at any other value."""


class Reader:
    """Typed look-up in a config dict; faults go to the refusal collector.

    Attributes:
        complete: False once a value was missing or of another type; a zero stands for it then.
    """

    def __init__(self, data: Mapping[str, Any], refusals: Refusals, prefix: str = ""):
        self.data, self.refusals, self.prefix = data, refusals, prefix
        self.complete = True

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            self.complete = self.refusals.check(False, f"{self.prefix}{key}: missing")
            return kind()
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            reason = expect(f"{self.prefix}{key}", kind.__name__, repr(value))
            self.complete = self.refusals.check(False, reason)
            return kind()
        return value

    def layers(self, key: str, num_layers: int) -> tuple[bool, ...]:
        flags = self.data.get(key)
        if not isinstance(flags, list | tuple):
            self.refusals.check(
                False, expect(f"{self.prefix}{key}", "a list, one entry a layer", repr(flags))
            )
            return ()
        self.refusals.check(
            len(flags) == num_layers,
            expect(f"{self.prefix}{key}", f"{num_layers} entries (num_hidden_layers)", len(flags)),
        )
        bad = [f for f in flags if f not in (0, 1)]
        self.refusals.check(not bad, expect(f"{self.prefix}{key}", "entries 0 or 1", repr(bad[:4])))
        return tuple(f == 1 for f in flags)


def as_dict(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict"):
        data = config.to_dict()
        for key in ("text_config", "sparse_attention_config"):
            if getattr(config, key, None) is not None:
                data[key] = getattr(config, key)
        return data
    raise TypeError(expect("config", "a dict or a transformers config", type(config).__name__))


def refuse_unknown_keys(text: Mapping, sparse: Mapping, refusals: Refusals) -> None:
    """Keys that nobody here reads, of the kinds that change what the model computes."""
    for key in sorted(set(sparse) - _SPARSE_KEYS):
        refusals.check(False, f"sparse_attention_config.{key}: unknown key")
    for key in sorted(text):
        if key.startswith(_FUNCTIONAL_PREFIXES) and key not in _KNOWN_FUNCTIONAL_KEYS:
            refusals.check(False, f"{key}: unknown key that would change the computation")


def refuse_stray_rope(top: Mapping, text: Mapping, refusals: Refusals) -> None:
    """A rope_scaling beside text_config never reaches the text model: say so."""
    for key in ("rope_scaling", "rope_parameters"):
        value = top.get(key)
        if not value or value == text.get(key):
            continue
        if isinstance(value, Mapping) and not (value.get("factor") or key == "rope_scaling"):
            continue
        refusals.check(
            False,
            f"{key} at the top level of a VL config does not reach the text model: "
            f"set text_config.{key}",
        )


def read_rope(
    text: Mapping, head_dim: int, max_position: int, refusals: Refusals
) -> dict[str, Any]:
    """Fields of `RopeConfig`, from the text config and its rope_parameters or rope_scaling."""
    parameters = {k: text[k] for k in ("rope_theta", "partial_rotary_factor") if k in text}
    for key in ("rope_parameters", "rope_scaling"):
        given = text.get(key)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            refusals.check(False, expect(key, "a dict", repr(given)))
            continue
        for name in sorted(set(given) - _ROPE_KEYS - set(_YARN_DEFAULTS)):
            refusals.check(False, f"{key}.{name}: unknown key")
        parameters |= given
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    reader = Reader(parameters, refusals, "rope_scaling.")
    theta = Reader(parameters, refusals).get("rope_theta", float)
    factor = reader.get("factor", float, 1.0)
    original = reader.get("original_max_position_embeddings", int, max_position)
    if kind == "yarn":
        ok = 1.0 <= factor < float("inf")
        refusals.check(ok, expect("rope_scaling.factor", "a finite number >= 1", factor))
        for name, default in _YARN_DEFAULTS.items():
            got = parameters.get(name, default)
            refusals.check(got == default, expect(f"rope_scaling.{name}", default, repr(got)))
    elif kind == "default":
        refusals.check(
            factor == 1.0,
            expect("rope_scaling.rope_type", f"'yarn' (factor is {factor})", "no or another type"),
        )
        original = max_position
    else:
        refusals.check(False, expect("rope_scaling.rope_type", "'default' or 'yarn'", repr(kind)))
    rotary_dim = _read_rotary_dim(text, parameters, head_dim, refusals)
    return {
        "theta": theta,
        "rotary_dim": rotary_dim,
        "original_max_position": original,
        "factor": factor,
    }


def _read_rotary_dim(text: Mapping, parameters: Mapping, head_dim: int, refusals: Refusals) -> int:
    reader = Reader(parameters, refusals)
    given = parameters.get("partial_rotary_factor") is not None
    partial = reader.get("partial_rotary_factor", float, 1.0)
    whole = int(head_dim * partial)
    rotary_dim = Reader(text, refusals).get("rotary_dim", int, whole)
    refusals.check(
        not given or rotary_dim == whole,
        expect("rotary_dim", f"head_dim * {partial} = {head_dim * partial}", rotary_dim),
    )
    return rotary_dim


def check_switches(reader: Reader, sparse_reader: Reader) -> None:
    """Switches that select another computation than the one implemented here."""
    wanted = {
        "hidden_act": ("swigluoai",),
        "qk_norm_type": ("per_head",),
        "scoring_func": ("sigmoid",),
        "use_gemma_norm": (True,),
        "use_qk_norm": (True,),
        "attention_output_gate": (False,),
        "tie_word_embeddings": (False,),
        "use_routing_bias": (True,),
    }
    for key, allowed in wanted.items():
        value = reader.data.get(key, allowed[0])
        reader.refusals.check(
            value in allowed, expect(key, " or ".join(map(repr, allowed)), repr(value))
        )
    score = sparse_reader.data.get("sparse_score_type", "max")
    reader.refusals.check(
        score == "max", expect("sparse_attention_config.sparse_score_type", "'max'", repr(score))
    )
    disabled = sparse_reader.data.get("sparse_disable_index_value")
    freq = sparse_reader.data.get("sparse_attention_freq")
    freq = freq if isinstance(freq, list | tuple) else []
    if disabled is not None and not isinstance(disabled, list | tuple):
        reader.refusals.check(
            False,
            expect(
                "sparse_attention_config.sparse_disable_index_value",
                "a list, one entry a layer",
                repr(disabled),
            ),
        )
    elif disabled is not None:
        bad = [i for i, f in enumerate(freq) if f and not (i < len(disabled) and disabled[i])]
        reader.refusals.check(
            not bad,
            f"sparse_attention_config.sparse_disable_index_value: layers {bad} ask for an index "
            "value projection, which is not implemented",
        )

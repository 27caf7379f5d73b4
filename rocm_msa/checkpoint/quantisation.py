"""How the linears of a checkpoint are quantised: read from its config, and written into a new one.

Four algorithms a module can have (the packed dimension is always K, the input):

    bf16    weight [N, K] bf16
    mxfp8   weight [N, K] e4m3fn, weight_scale_inv or weight_scale [N, K/32] E8M0 (uint8)
    nvfp4   weight [N, K/2] uint8, weight_scale [N, K/16] e4m3fn, weight_scale_2 [] fp32,
            input_scale [] fp32
    mxfp4   weight [N, K/2] uint8, weight_scale [N, K/32] E8M0 (uint8)

Four layouts of a whole checkpoint: `bf16`; `mxfp8` (every linear but lm_head, MiniMax's own tag);
`nvfp4` (ModelOpt MIXED_PRECISION: routed experts NVFP4, the other linears MXFP8); `mxfp4` (Quark:
routed and shared experts MXFP4, the rest bf16).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from typing import Any

LAYOUTS = ("bf16", "mxfp8", "nvfp4", "mxfp4")
VL_PREFIX = "language_model."
KV_SCALE = re.compile(r".*\.self_attn\.(attn\.|[kv]_proj\.)?[kv]_scale$")
OUTSIDE_PREFIXES = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")
MX_GROUP = 32
NVFP4_GROUP = 16

_MODELOPT_ALGORITHMS = {"MXFP8": "mxfp8", "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4"}
_QUARK_DTYPES = {"fp4": "mxfp4", "fp8_e4m3": "mxfp8"}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of an HF config: `text_config` of a VL one, the config itself otherwise."""
    return config.get("text_config") or config


def is_vl(config: Mapping[str, Any]) -> bool:
    return bool(config.get("text_config"))


def is_outside(name: str) -> bool:
    """True for what the text table does not cover: vision, MTP modules, K and V cache scales."""
    return name.startswith(OUTSIDE_PREFIXES) or "mtp." in name or KV_SCALE.match(name) is not None


def canonical(name: str) -> str:
    """A module or tensor name as the text model says it, without the VL prefix."""
    return name.removeprefix(VL_PREFIX)


@dataclass(frozen=True)
class Quantisation:
    """Which algorithm each module has.

    Attributes:
        default: the algorithm of a linear that nothing else names.
        listed: module -> algorithm; when given, a linear that is not in it is bf16.
        excluded: patterns of modules that stay bf16: an exact name, a glob, `re:<regex>`, or
            (`substring`) any part of the name.
    """

    default: str = "bf16"
    listed: Mapping[str, str] | None = None
    excluded: tuple[str, ...] = field(default=())
    substring: bool = False

    def algorithm(self, module: str) -> str:
        """The algorithm of one module, e.g. `model.layers.3.self_attn.q_proj`."""
        name = canonical(module)
        if self.default == "bf16" and not self.listed:
            return "bf16"
        if name.endswith(("embed_tokens", "block_sparse_moe.gate")) or self._is_excluded(name):
            return "bf16"
        if self.listed is not None:
            return self._from_list(name)
        return self.default

    def _from_list(self, name: str) -> str:
        return next((self.listed[p] for p in _with_parents(name) if p in self.listed), "bf16")

    @cached_property
    def _excluded_names(self) -> frozenset[str]:
        return frozenset(canonical(p) for p in self.excluded)

    @cached_property
    def _excluded_patterns(self) -> tuple[re.Pattern[str], ...]:
        out = []
        for pattern in self.excluded:
            if pattern.startswith("re:"):
                out.append(re.compile(pattern[3:]))
            elif any(c in pattern for c in "*?["):
                out.append(re.compile(translate(canonical(pattern))))
            elif self.substring:
                out.append(re.compile(f".*{re.escape(canonical(pattern))}"))
        return tuple(out)

    def _is_excluded(self, name: str) -> bool:
        if any(parent in self._excluded_names for parent in _with_parents(name)):
            return True
        names = (name, VL_PREFIX + name)
        return any(p.match(n) for p in self._excluded_patterns for n in names)


def _with_parents(name: str) -> Iterator[str]:
    """a.b.c, then a.b, then a."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def quantisation_of(config: Mapping[str, Any]) -> Quantisation:
    """Read `quantization_config` of an HF config (none at all means bf16).

    Args:
        config: the HF config as a dict, or its `quantization_config` alone.

    Raises:
        NotImplementedError: a method or an algorithm that is none of the four.
    """
    quant = config if "quant_method" in config else config.get("quantization_config")
    quant = quant or text_config(config).get("quantization_config")
    if not quant:
        return Quantisation()
    method = str(quant.get("quant_method", "")).lower()
    if method == "mxfp8":
        return Quantisation("mxfp8", excluded=_patterns(quant, "ignored_layers"), substring=True)
    if method.startswith("modelopt"):
        return _modelopt(quant.get("quantization", quant))
    if method == "quark":
        return _quark(quant)
    raise NotImplementedError(
        f"quantization_config.quant_method: expected mxfp8, modelopt or quark, got {method!r}"
    )


def _patterns(quant: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(p for key in keys for p in quant.get(key) or ())


def _modelopt(quant: Mapping[str, Any]) -> Quantisation:
    excluded = _patterns(quant, "ignore", "exclude_modules")
    algo = str(quant.get("quant_algo", "")).upper()
    if algo == "MIXED_PRECISION":
        listed = {
            canonical(module): _modelopt_algorithm(str(entry.get("quant_algo")), module)
            for module, entry in (quant.get("quantized_layers") or {}).items()
        }
        return Quantisation(listed=listed, excluded=excluded, substring=True)
    return Quantisation(_modelopt_algorithm(algo, "quant_algo"), excluded=excluded, substring=True)


def _modelopt_algorithm(algo: str, where: str) -> str:
    if algo.upper() not in _MODELOPT_ALGORITHMS:
        known = ", ".join(_MODELOPT_ALGORITHMS)
        raise NotImplementedError(
            f"quantization_config, {where}: expected one of {known}, got {algo!r}"
        )
    return _MODELOPT_ALGORITHMS[algo.upper()]


def _quark(quant: Mapping[str, Any]) -> Quantisation:
    listed = {
        name: _quark_algorithm(entry, name)
        for name, entry in (quant.get("layer_quant_config") or {}).items()
    }
    if listed:
        raise NotImplementedError(
            "quantization_config.layer_quant_config: only one global Quark scheme is supported, "
            f"got entries for {', '.join(sorted(listed)[:3])}"
        )
    default = _quark_algorithm(quant.get("global_quant_config") or {}, "global_quant_config")
    return Quantisation(default, excluded=_patterns(quant, "exclude"))


def _quark_algorithm(entry: Mapping[str, Any], where: str) -> str:
    weight = entry.get("weight") or {}
    weight = weight[0] if isinstance(weight, list) else weight
    algorithm = _QUARK_DTYPES.get(weight.get("dtype"))
    if (
        algorithm is None
        or weight.get("qscheme") != "per_group"
        or weight.get("group_size") != MX_GROUP
        or weight.get("scale_format") != "e8m0"
    ):
        raise NotImplementedError(
            f"quantization_config.{where}.weight: expected an OCP MX scheme (dtype fp4 or "
            f"fp8_e4m3, qscheme per_group, group_size 32, scale_format e8m0), got {dict(weight)}"
        )
    return algorithm


def quantization_config(layout: str, linears: list[str], vl: bool) -> dict[str, Any] | None:
    """The `quantization_config` to write for a layout; None for bf16.

    Args:
        linears: every module with a 2-D weight that could be quantised, in file naming.
    """
    head = (VL_PREFIX if vl else "") + "lm_head"
    vision = [prefix.rstrip(".") for prefix in OUTSIDE_PREFIXES] if vl else []
    if layout == "bf16":
        return None
    if layout == "mxfp8":
        return {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, MX_GROUP],
            "scale_fmt": "ue8m0",
            "ignored_layers": [head, *vision],
        }
    if layout == "nvfp4":
        return {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "producer": {"name": "rocm-msa make-checkpoint"},
            "ignore": [head, *(f"{v}*" for v in vision)],
            "quantized_layers": {
                module: (
                    {"quant_algo": "NVFP4", "group_size": NVFP4_GROUP}
                    if ".experts." in module
                    else {"quant_algo": "MXFP8", "group_size": MX_GROUP}
                )
                for module in linears
            },
        }
    if layout == "mxfp4":
        mx = {
            "dtype": "fp4",
            "qscheme": "per_group",
            "group_size": MX_GROUP,
            "ch_axis": -1,
            "scale_format": "e8m0",
            "round_method": "half_even",
            "symmetric": None,
        }
        kept = [m for m in linears if "experts." not in m]
        return {
            "quant_method": "quark",
            "quant_mode": "eager_mode",
            "global_quant_config": {
                "weight": {**mx, "is_dynamic": False},
                "input_tensors": {**mx, "is_dynamic": True},
                "output_tensors": None,
                "bias": None,
            },
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "exclude": [head, *kept, *(f"re:{v}.*" for v in vision)],
            "export": {
                "kv_cache_group": [],
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "min_kv_scale": 0.0,
            },
        }
    raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")

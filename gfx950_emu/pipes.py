"""Which pipe of a compute unit an instruction goes to, from its mnemonic."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from enum import Enum


class Pipe(Enum):
    """In the order in which they are shown."""

    MFMA = "MFMA"
    VALU = "VALU"
    VOPC = "VOPC"
    TRANS = "transcendental"
    SALU = "SALU"
    SMEM = "SMEM"
    DS = "DS"
    VMEM_LOAD = "VMEM load"
    VMEM_STORE = "VMEM store"
    ATOMIC = "VMEM atomic"
    CACHE = "cache control"
    BRANCH = "branch"
    WAIT = "wait, barrier"
    OTHER = "other"


# The first pattern that matches from the start of the mnemonic decides.
PATTERNS = [
    (re.compile(pattern), pipe)
    for pattern, pipe in (
        (r"v_s?mfma", Pipe.MFMA),
        (r"v_smfmac", Pipe.MFMA),
        (r"v_cmpx?_", Pipe.VOPC),
        (r"v_(exp|log|rcp|rsq|sqrt|sin|cos|rcp_iflag)(_legacy)?_(bf16|f16|f32|f64)", Pipe.TRANS),
        (r"v_", Pipe.VALU),
        (r"s_(c?branch|setpc|swappc|call|endpgm)", Pipe.BRANCH),
        (r"s_(waitcnt|barrier|sleep)", Pipe.WAIT),
        (r"s_(load|buffer_load|store|buffer_store|scratch|memtime|memrealtime)", Pipe.SMEM),
        (r"s_(dcache|atc_probe|buffer_atomic|atomic)", Pipe.SMEM),
        (r"s_(nop|setprio|sendmsg|sethalt|trap|icache_inv|ttrace|set_gpr_idx_o)", Pipe.OTHER),
        (r"s_(incperflevel|decperflevel|setkill|wakeup|endpgm_saved)", Pipe.OTHER),
        (r"s_", Pipe.SALU),
        (r"ds_", Pipe.DS),
        (r"buffer_(wbl2|inv|wbinvl1)", Pipe.CACHE),
        (r"(buffer|tbuffer|global|flat|scratch)_atomic", Pipe.ATOMIC),
        (r"(buffer|tbuffer|global|flat|scratch)_load", Pipe.VMEM_LOAD),
        (r"(buffer|tbuffer|global|flat|scratch)_store", Pipe.VMEM_STORE),
    )
]


def pipe_of(mnemonic: str) -> Pipe:
    for pattern, pipe in PATTERNS:
        if pattern.match(mnemonic):
            return pipe
    return Pipe.OTHER


def histogram(mnemonics: Iterable[str]) -> dict[Pipe, Counter[str]]:
    """How often each mnemonic of each pipe occurs."""
    found: dict[Pipe, Counter[str]] = {}
    for mnemonic in mnemonics:
        found.setdefault(pipe_of(mnemonic), Counter())[mnemonic] += 1
    return {pipe: found[pipe] for pipe in Pipe if pipe in found}

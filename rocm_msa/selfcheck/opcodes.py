"""Single gfx950 instructions on a runtime, against the emulator's stored answers.

    faults = check(load(), runtime, device)         # one text a wrong instruction

Compared bit for bit; where an instruction gives f32 any NaN equals any other, and the few that the
ISA allows to be inexact (v_exp_f32, v_log_f32, v_rcp_f32, v_rsq_f32) may be `Case.ulp` codes away.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from rocm_msa.launcher import Runtime
from rocm_msa.selfcheck.opcode_data import (
    GROUPS,
    LANES,
    Case,
    Stored,
    inputs,
    memory,
    wrong_words,
)

SHOWN = 3


def run_all(
    code_object: bytes,
    cases: Sequence[Case],
    runtime: Runtime,
    device: torch.device,
    reach: Callable[[list[torch.Tensor]], None] = lambda tensors: None,
) -> Iterator[tuple[Case, np.ndarray]]:
    """(case, its output uint32 [GROUPS, slots, LANES]) of each case.

    Args:
        runtime: loads and launches; its current device is `device`.
        reach: is told before each launch which tensors it may touch.
    """
    module = runtime.load_module(code_object, "the opcode checks")
    for number, case in enumerate(cases):
        function = runtime.get_function(module, case.name, case.text)
        given = inputs(number, case.kind).view(np.int32)
        shape = (GROUPS, len(case.out), LANES)
        tensors = [
            torch.from_numpy(given).to(device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.from_numpy(memory(number).copy()).to(device),
        ]
        reach(tensors)
        kernarg = struct.pack("<3Q", *(t.data_ptr() for t in tensors))
        subject = f"opcode check {case.text!r}"
        runtime.launch(function, (GROUPS, 1, 1), (LANES, 1, 1), 0, 0, kernarg, subject)
        yield case, tensors[1].cpu().numpy().view(np.uint32)


def check(
    stored: Stored,
    runtime: Runtime,
    device: torch.device,
    reach: Callable[[list[torch.Tensor]], None] = lambda tensors: None,
) -> Iterator[tuple[Case, str | None]]:
    """(case, what is wrong or None) of each stored case."""
    ran = run_all(stored.code_object, stored.cases, runtime, device, reach)
    for (case, got), want in zip(ran, stored.expected, strict=True):
        yield case, fault(case, got, want)


def fault(case: Case, got: np.ndarray, want: np.ndarray) -> str | None:
    """The first wrong words in words; None when there are none."""
    wrong = wrong_words(case, got, want)
    if not wrong:
        return None
    shown = "; ".join(
        f"group {g} lane {lane} {case.out[slot]}: expected {want[g, slot, lane]:#010x}, "
        f"got {got[g, slot, lane]:#010x}"
        for g, slot, lane in wrong[:SHOWN]
    )
    return f"{len(wrong)} of {got.size} words: {shown}"

"""How many wave-instructions a second the gfx950 emulator runs, on one core.

    python benchmarks/bench_emulator.py [--json FILE]

Kernels written in assembly: a loop of VALU, matrix and some LDS instructions, and four ranks of
256 persistent workgroups of 512 threads with a barrier across all of them (target: 10 M
wave-instructions in 10 s and 4 GiB). And Triton's bf16 product of 64 x 128 x 256, which has more
LDS and matrix instructions. Targets: 3 M/s with all checks, 5 M/s without.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gfx950_emu import Checks, Machine, Schedule, launch
from tests.emulator.assembler import kernel
from tests.emulator.corpus import BY_NAME
from tests.emulator.test_machine_corpus import queue

ROUNDS = 400


def compute_kernel() -> str:
    valu = [
        "v_fma_f32 v10, v11, v12, v10",
        "v_add_u32 v13, v13, v0",
        "v_pk_mul_f32 v[14:15], v[16:17], v[14:15]",
        "v_perm_b32 v18, v13, v19, s9",
        "v_mul_f32 v20, v11, v20",
        "v_max_f32 v21, v20, v21",
        "v_lshl_or_b32 v22, v13, 4, v19",
        "v_cvt_pk_bf16_f32 v23, v10, v11",
        "v_bitop3_b32 v24, v13, v19, v22 bitop3:0x6c",
        "v_exp_f32 v25, v12",
    ]
    lines = ["v_lshlrev_b32 v1, 4, v0", f"s_movk_i32 s8, {ROUNDS}", "s_mov_b32 s9, 0x5040100"]
    lines += [f"v_mov_b32 v{r}, 1.0" for r in range(10, 64)]
    lines += [f"v_mov_b32 v{r}, 0" for r in range(2, 10)]
    lines += ["loop:"]
    for _ in range(4):
        lines += valu
    lines += ["v_mfma_f32_16x16x32_bf16 v[40:43], v[32:35], v[36:39], v[40:43]", "s_nop 7",
              "ds_write_b128 v1, v[44:47]", "ds_read_b128 v[48:51], v1", "s_waitcnt lgkmcnt(0)",
              "s_sub_u32 s8, s8, 1", "s_cmp_lg_u32 s8, 0", "s_cbranch_scc1 loop"]  # fmt: skip
    return "\n".join(lines)


PERSISTENT = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_load_dword s8, s[0:1], 0x10
v_mov_b32 v1, 0
v_mov_b32 v2, 1
v_mov_b32 v10, v0
s_movk_i32 s10, 30
s_waitcnt lgkmcnt(0)
outer:
{work}
s_barrier
s_sub_u32 s10, s10, 1
s_cmp_lg_u32 s10, 0
s_cbranch_scc1 outer
v_cmp_eq_u32 vcc, 0, v0
s_and_saveexec_b64 s[12:13], vcc
s_cbranch_execz done
global_atomic_add v3, v1, v2, s[4:5] sc0 sc1
s_waitcnt vmcnt(0)
poll:
s_sleep 1
global_load_dword v3, v1, s[4:5] sc0 sc1
s_waitcnt vmcnt(0)
v_readfirstlane_b32 s9, v3
s_cmp_lt_u32 s9, s8
s_cbranch_scc1 poll
done:
""".replace("{work}", "\n".join(["v_mul_lo_u32 v10, v10, v0", "v_add_u32 v11, v10, v0"] * 18))


def measure(run) -> tuple[float, object]:
    run()  # decode and first touch
    start = time.perf_counter()
    report = run()
    return time.perf_counter() - start, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []

    def row(name: str, seconds: float, report, target: str) -> None:
        assert report.ok, report.findings
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        rows.append({"case": name, "instructions": report.executed, "seconds": seconds,
                     "million_per_s": report.executed / seconds / 1e6, "peak_gib": peak,
                     "target": target})  # fmt: skip

    code = kernel(compute_kernel(), vgprs=64, lds=4096)
    for name, checks, target in (
        ("VALU + MFMA, all checks", Checks.ALL, ">= 3 M/s"),
        ("VALU + MFMA, no checks", Checks.NONE, ">= 5 M/s"),
    ):
        seconds, report = measure(lambda c=checks: launch(
            code, "k", 64, 64, [], checks=c, schedule=Schedule(quantum=(1000, 1000))))  # fmt: skip
        row(name, seconds, report, target)

    product = BY_NAME["triton_dot_bf16_64x128x256"]
    product = dataclasses.replace(product, grid=(64, 1, 1))  # all make the same tile
    arguments_of_product = product.make_args(0)

    def dot(checks):
        machine = Machine(schedule=Schedule(quantum=(1000, 1000)), checks=checks)
        queue(machine, product, arguments_of_product)
        return machine.run()

    for name, checks, target in (
        ("Triton dot 64x128x256, all checks", Checks.ALL, ">= 3 M/s"),
        ("Triton dot 64x128x256, no checks", Checks.NONE, ">= 5 M/s"),
    ):
        seconds, report = measure(lambda c=checks: dot(c))
        row(name, seconds, report, target)

    persistent = kernel(PERSISTENT, vgprs=64, lds=1024)
    counters = np.zeros(16, np.uint32)

    def ranks():
        counters[:] = 0
        machine = Machine(schedule=Schedule(quantum=(200, 200)))
        for rank in range(4):
            machine.launch(persistent, "k", 256, 512, [counters, counters, 4 * 256], rank=rank)
        return machine.run()

    seconds, report = measure(ranks)
    row("4 ranks x 256 x 512, all checks", seconds, report, "10 M in 10 s, 4 GiB")
    print(f"{'case':34} {'instructions':>13} {'s':>7} {'M/s':>7} {'peak GiB':>9}  target")
    for r in rows:
        rate = r["million_per_s"]
        print(f"{r['case']:34} {r['instructions']:13,} {r['seconds']:7.2f} {rate:7.2f} "
              f"{r['peak_gib']:9.2f}  {r['target']}")  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

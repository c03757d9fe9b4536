"""The wheel works by itself: from a folder that is not the checkout, which is not importable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
from command_lines import command_line
from distributed import free_port
from launching import BIN, ROOT, job
from packaging.requirements import Requirement

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "requirements.txt", "requirements-test.txt")
COMMANDS = ("preprocess", "plan", "fit", "simulate", "export", "generate")


def pip(*words: str | Path, folder: Path) -> None:
    """Runs pip without a network."""
    command = [sys.executable, "-m", "pip", *map(str, words), "--no-deps", "--no-index", "-q"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from a copy, since setuptools leaves a ``build`` folder behind."""
    copy = tmp_path_factory.mktemp("sources")
    for name in (*SOURCES, "pretrain_edit.py"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "megatron_edit", copy / "megatron_edit")
    pip("wheel", "--no-build-isolation", ".", folder=copy)
    (made,) = copy.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's modules and, in ``bin``, its commands."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--target", folder, wheel, folder=folder)
    return folder


def environment(installed: Path) -> dict[str, str]:
    """In it this Python finds the installed package, not the checkout."""
    return {**os.environ, "PYTHONPATH": str(installed)}


def test_the_wheel_holds_the_package_and_no_more(wheel: Path) -> None:
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron_edit").rglob("*.py")}
    assert names == {*modules, "megatron_edit/py.typed", "pretrain_edit.py"}


def test_the_wheel_asks_for_what_the_requirements_list(wheel: Path) -> None:
    archive = ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    lines = message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    asked = [Requirement(line) for line in lines]
    for file, extra in (("requirements.txt", False), ("requirements-test.txt", True)):
        listed = [Requirement(line) for line in (ROOT / file).read_text().splitlines()]
        assert {(r.name, r.specifier) for r in asked if bool(r.marker) == extra} == {
            (r.name, r.specifier) for r in listed
        }


def test_the_checkout_is_out_of_the_way(installed: Path, tmp_path: Path) -> None:
    code = "from importlib.util import find_spec as f; "
    code += "print(f('megatron_edit').origin, f('pretrain_edit').origin)"
    found = subprocess.check_output(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(installed), text=True
    )
    package, script = installed / "megatron_edit" / "__init__.py", installed / "pretrain_edit.py"
    assert found.split() == [str(package), str(script)]


def test_commands_run(installed: Path, tmp_path: Path) -> None:
    running = {
        f"edit-{name}": subprocess.Popen(
            [installed / "bin" / f"edit-{name}", "--help"],
            cwd=tmp_path,
            env=environment(installed),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in COMMANDS
    }
    for name, process in running.items():
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0, printed
        assert printed.startswith(f"usage: {name} ")


LAUNCHERS = {
    "torchrun": ["--nproc-per-node=2", "--master-port={port}", "-m", "pretrain_edit"],
    "deepspeed": ["--num_accelerators=2", "--master_port={port}", "--module", "pretrain_edit"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_train(launcher: str, installed: Path, tmp_path: Path) -> None:
    changes = "--mock-data --edit-replicas 2 --edit-warmup-steps 1 --edit-sync-interval 1"
    flags = command_line(f"{changes} --log-interval 1 --eval-iters 0 --train-iters 3 --save save")
    words = [word.format(port=free_port()) for word in LAUNCHERS[launcher]]
    command = [str(BIN / launcher), *words, *flags]
    with job(command, tmp_path / "log", tmp_path, PYTHONPATH=str(installed)) as running:
        assert running.await_end() == 0, running.output
        assert set(running.losses()) == {1, 2, 3}
    assert (tmp_path / "save" / "iter_0000003" / "state.json").is_file()

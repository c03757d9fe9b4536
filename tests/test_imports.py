"""Imports go one way between the rooms of the package; docs/architecture.md draws the rule."""

from __future__ import annotations

import shutil
from pathlib import Path

import make_pictures
import pytest
from imports import MAY_IMPORT, circle, forbidden, heavy, read, room

ROOT = Path(__file__).resolve().parent.parent


def test_imports_go_one_way() -> None:
    imports = read(ROOT)
    assert len(imports) > 500
    assert list(forbidden(imports)) == []


def test_scaling_loads_no_torch() -> None:
    assert list(heavy(read(ROOT))) == []


def test_no_modules_import_one_another() -> None:
    assert circle(read(ROOT)) == []


def test_every_room_has_its_rule() -> None:
    assert {room(entry.importer) for entry in read(ROOT)} - {""} == set(MAY_IMPORT)
    # Of two rooms at most one may import the other.
    for here, allowed in MAY_IMPORT.items():
        assert here not in allowed
        assert not any(here in MAY_IMPORT[there] for there in allowed)


def test_the_drawing_is_the_rule() -> None:
    rooms = make_pictures.ROOMS
    below = {
        name: {
            other
            for other, lower in rooms.items()
            if lower.row >= room.row + room.rows
            and lower.left < room.right
            and room.left < lower.right
        }
        for name, room in rooms.items()
    }
    assert below == MAY_IMPORT


# (module, lines added to it, part of the complaint)
FORBIDDEN = [
    ("engine/outer.py", "from megatron_edit.backends.megatron import units", "engine may import"),
    ("engine/outer.py", "def f():\n    import megatron_edit.run.stop", "engine may import"),
    ("engine/outer.py", "from ..checkpoint import flights", "engine may import"),
    (
        "engine/round.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.distributed.fsdp",
        "engine does without",
    ),
    ("engine/round.py", "from torch.distributed import fsdp", "engine does without"),
    ("replicas/mesh.py", "from megatron.core import parallel_state", "replicas does without"),
    ("replicas/peers.py", "import importlib\nimportlib.import_module('megatron.core')", "without"),
    ("replicas/peers.py", "from megatron_edit.data import corpus", "replicas may import"),
    ("platform/cpu.py", "from megatron_edit.config import flags", "platform may import"),
    ("errors.py", "from megatron_edit.config import flags", "errors may import no room"),
    ("scaling/tables.py", "def f():\n    import torch", "scaling does without"),
    ("scaling/tables.py", "from megatron_edit.replicas import mesh", "scaling may import"),
    ("checkpoint/flights.py", "from megatron_edit.run import stop", "checkpoint may import"),
    ("run/stop.py", "from megatron_edit import EditConfig", "run may import"),
    ("run/stop.py", "import pretrain_edit", "nothing of its users"),
    ("data/corpus.py", "from tests import harness", "nothing of its users"),
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A tree with the package, to be spoilt."""
    shutil.copytree(ROOT / "megatron_edit", tmp_path / "megatron_edit")
    return tmp_path


def add(copy: Path, module: str, lines: str) -> None:
    """Appends lines to a module of the copy."""
    path = copy / "megatron_edit" / module
    path.write_text(f"{path.read_text()}\n{lines}\n")


@pytest.mark.parametrize(("module", "lines", "complaint"), FORBIDDEN)
def test_a_forbidden_import_is_found(module: str, lines: str, complaint: str, copy: Path) -> None:
    add(copy, module, lines)
    (found,) = forbidden(read(copy))
    name = "megatron_edit." + module.removesuffix(".py").replace("/", ".")
    assert found.startswith(f"{name}:")
    assert complaint in found


def test_torch_by_way_of_another_room_is_found(copy: Path) -> None:
    add(copy, "config/methods.py", "from megatron_edit.config import checks")
    assert any("megatron_edit.config.checks:" in complaint for complaint in heavy(read(copy)))
    assert list(forbidden(read(copy))) == []


@pytest.mark.parametrize(
    "lines",
    [
        "from megatron_edit.engine import sync_engine",
        "def f():\n    from megatron_edit.engine.sync_engine import SyncEngine",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import sync_engine",
    ],
)
def test_a_circle_is_found(lines: str, copy: Path) -> None:
    add(copy, "engine/record.py", lines)
    found = circle(read(copy))
    assert {"megatron_edit.engine.record", "megatron_edit.engine.sync_engine"} <= set(found)

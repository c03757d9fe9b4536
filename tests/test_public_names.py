"""What the package offers, and that a mistyped flag does not wait for its imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import megatron_edit

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("megatron.core", "deepspeed", "transformers")


def python(code: str) -> str:
    """What a fresh interpreter prints that runs the code in the checkout's root."""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", megatron_edit.__all__)
def test_a_public_name_is_what_its_module_has(name: str) -> None:
    value = getattr(megatron_edit, name)
    assert value.__name__ == name
    assert value is getattr(import_module(value.__module__), name)
    assert name in dir(megatron_edit)


def test_type_checkers_see_the_names_where_they_are() -> None:
    tree = ast.parse(Path(str(megatron_edit.__file__)).read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron_edit.")
        for alias in node.names
    }
    assert seen == {name: getattr(megatron_edit, name).__module__ for name in megatron_edit.__all__}


def test_an_unknown_name_is_none_of_ours() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'EditConfg'"):
        _ = megatron_edit.EditConfg  # type: ignore[attr-defined]


def test_the_package_alone_loads_no_torch() -> None:
    code = "import sys, megatron_edit; megatron_edit.EditConfig; print('torch' in sys.modules)"
    assert python(code) == "False\n"


def test_a_mistyped_flag_loads_no_megatron() -> None:
    code = f"""
import sys
sys.argv[1:] = ["--edit-sync-intervall", "8"]
try:
    import pretrain_edit
    pretrain_edit.main()
except SystemExit as exit:
    print(exit.code, [name for name in {HEAVY} if name in sys.modules])
"""
    assert python(code) == "2 []\n"

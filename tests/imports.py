"""Reads the imports of a package without running it, and holds them to the rule of the rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "megatron_edit"
BOTTOM = {"errors"}
CONFIG = {"platform", *BOTTOM}
LOW = {"config", *CONFIG}
ENGINE = {"replicas", "data", *LOW}
BACKENDS = {"engine", *ENGINE}
UPPER = {"backends", *BACKENDS}
# Room -> the rooms it may import. `errors` is a module, and as low as a room can be.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "platform": BOTTOM,
    "config": CONFIG,
    "replicas": LOW,
    "data": LOW,
    "engine": ENGINE,
    "backends": BACKENDS,
    "checkpoint": UPPER,
    "run": {"checkpoint", *UPPER},
    "scaling": {"config", *BOTTOM},
    "commands": {"run", "checkpoint", "scaling", *UPPER},
}
# What a room must not import from outside of the package.
FOREIGN: dict[str, tuple[str, ...]] = {
    "engine": ("megatron.core", "torch.distributed.fsdp", "deepspeed"),
    "replicas": ("megatron.core", "torch.distributed.fsdp", "deepspeed"),
    "scaling": ("torch", "megatron.core", "deepspeed"),
}
# The package is imported by these, never the other way round.
USERS = ("pretrain_edit", "scripts", "tests", "benchmarks", "examples")


@dataclass(frozen=True)
class Import:
    """One module that another one names.

    Attributes:
        importer: Dotted name of the module that imports.
        line: Its line.
        target: Dotted name of what is imported.
        on_load: Whether it happens when the importer is loaded: neither in a function nor for type
            checkers alone.
    """

    importer: str
    line: int
    target: str
    on_load: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


class _Reader(ast.NodeVisitor):
    """Collects the imports of one module, wherever in it they stand."""

    def __init__(self, name: str, is_package: bool, modules: Mapping[str, Path]) -> None:
        self.found: list[Import] = []
        self._name, self._modules = name, modules
        self._package = name if is_package else name.rpartition(".")[0]
        self._later = 0

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parents = self._package.split(".")
            kept = parents[: len(parents) - node.level + 1]
            base = ".".join([*kept, base] if base else kept)
        for alias in node.names:
            full = f"{base}.{alias.name}"
            # A name of a module, or a module: outside of the package both are forbidden alike.
            own = base.split(".")[0] == PACKAGE
            self._add(node, base if own and full not in self._modules else full)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        called = function.attr if isinstance(function, ast.Attribute) else None
        called = function.id if isinstance(function, ast.Name) else called
        if called in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._add(node, name.value)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.AST) -> None:
        with self._not_on_load():
            self.generic_visit(node)

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).removeprefix("typing.") != "TYPE_CHECKING":
            self.generic_visit(node)
            return
        with self._not_on_load():
            for child in node.body:
                self.visit(child)
        for child in node.orelse:
            self.visit(child)

    @contextmanager
    def _not_on_load(self) -> Iterator[None]:
        self._later += 1
        yield
        self._later -= 1

    def _add(self, node: ast.stmt | ast.expr, target: str) -> None:
        self.found.append(Import(self._name, node.lineno, target, self._later == 0))


def read(root: Path) -> list[Import]:
    """Every import of the package in a folder."""
    modules: dict[str, Path] = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found = []
    for name, path in modules.items():
        reader = _Reader(name, path.name == "__init__.py", modules)
        reader.visit(ast.parse(path.read_text(), str(path)))
        found += reader.found
    return found


def room(module: str) -> str:
    """The room of a module of the package; "" is the package itself."""
    return module.partition(".")[2].partition(".")[0]


def _within(target: str, names: tuple[str, ...]) -> bool:
    return any(f"{target}.".startswith(f"{name}.") for name in names)


def forbidden(imports: list[Import]) -> Iterator[str]:
    """The imports that break the rule, as a person reads them."""
    for entry in imports:
        here = room(entry.importer)
        if _within(entry.target, USERS):
            yield f"{entry}: the package knows nothing of its users"
        # The package itself names what it offers.
        if not here:
            continue
        if _within(entry.target, FOREIGN.get(here, ())):
            yield f"{entry}: {here} does without"
        if entry.target.split(".")[0] != PACKAGE:
            continue
        there = room(entry.target)
        if there != here and there not in MAY_IMPORT[here]:
            yield f"{entry}: {here} may import {', '.join(sorted(MAY_IMPORT[here])) or 'no room'}"


def loaded_with(first: str, imports: list[Import]) -> dict[str, Import]:
    """Everything that loading the modules of a room loads, and the import that does it."""
    edges: dict[str, list[Import]] = {}
    for entry in imports:
        if entry.on_load:
            edges.setdefault(entry.importer, []).append(entry)
    reached: dict[str, Import] = {}
    waiting = [name for name in edges if room(name) == first]
    while waiting:
        for entry in edges.get(waiting.pop(), []):
            # A module is loaded after the packages it is in.
            parts = entry.target.split(".")
            for name in (".".join(parts[: i + 1]) for i in range(len(parts))):
                if name not in reached:
                    reached[name] = entry
                    waiting.append(name)
    return reached


def heavy(imports: list[Import]) -> Iterator[str]:
    """What `scaling` would load of torch and the like by way of other rooms."""
    for target, entry in loaded_with("scaling", imports).items():
        if _within(target, FOREIGN["scaling"]):
            yield f"{entry}: loaded with scaling"


def circle(imports: list[Import]) -> list[str]:
    """Modules that import one another in a circle, the first one last again; or nothing."""
    graph: dict[str, set[str]] = {}
    for entry in imports:
        if room(entry.importer) and entry.target.split(".")[0] == PACKAGE:
            graph.setdefault(entry.importer, set()).add(entry.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []

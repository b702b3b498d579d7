"""The import rules of the design: which part may know of what, read from the source of every module."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("activities", "algorithms", "cli", "examples", "proxy", "simulator", "storage", "workers", "workflows")
HEAVY = {"torch", "transformers", "deepspeed", "safetensors"}
NETWORK = {"aiohttp", "boto3", "httpx", "minio", "openai", "requests", "socket", "sqlalchemy", "urllib3", "websockets"}
WEB = {"fastapi", "starlette", "uvicorn", "uvloop"}

# Part of the tree -> what no module in it imports, directly or through other modules of ours.
FORBIDDEN = {
    "workflows": HEAVY | WEB | NETWORK,
    "storage": HEAVY | WEB,
    "proxy": HEAVY | {"httpx", "litellm"},
    "proxy/trajectory": HEAVY | WEB | NETWORK | {"asyncio"},
    "proxy/dialects": HEAVY | WEB | NETWORK | {"asyncio"},
    "simulator": HEAVY,
    "workers/engines/base.py": HEAVY,
    "workers/engines/sglang.py": HEAVY,
    "workers/trainer/launch.py": HEAVY,
    "workers/trainer/client.py": HEAVY,
    "workers/control.py": HEAVY,
    "workers/node_agent": HEAVY,
    "workers/agents": HEAVY,
    "activities": HEAVY,
    "cli": HEAVY,
}


def modules(part: str) -> list[Path]:
    path = ROOT / part
    return [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names imported anywhere in the file, by ``import`` or ``from``; not those for type checkers only."""
    tree = ast.parse(path.read_bytes(), str(path))
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package_of(path)[: len(package_of(path)) - node.level + 1], *filter(None, [base])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
            found.add(base)
    return frozenset(found)


def package_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).parent.parts


@functools.cache
def ours(name: str) -> Path | None:
    """File of a module of this project; None for others and for names within modules."""
    if name.split(".")[0] not in PACKAGES:
        return None
    base = ROOT.joinpath(*name.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def reached(start: Path) -> Iterator[tuple[Path, str]]:
    """(importing file, imported name) for everything that importing ``start`` may bring in."""
    todo, seen = [start], {start}
    while todo:
        file = todo.pop()
        for name in sorted(imports(file)):
            yield file, name
            parents = (".".join(name.split(".")[:length]) for length in range(1, name.count(".") + 2))
            for target in filter(None, map(ours, parents)):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)


@pytest.mark.parametrize("part", FORBIDDEN)
def test_a_part_does_not_import_what_the_design_forbids_it(part: str) -> None:
    broken = {
        f"{module.relative_to(ROOT)} reaches {name} by {by.relative_to(ROOT)}"
        for module in modules(part)
        for by, name in reached(module)
        if name.split(".")[0] in FORBIDDEN[part]
    }
    assert not broken


def test_algorithms_import_nothing_but_torch_and_the_standard_library() -> None:
    allowed = {"torch", "algorithms", *sys.stdlib_module_names}
    broken = {
        f"{module.relative_to(ROOT)}: {name}"
        for module in modules("algorithms")
        for name in imports(module)
        if name.split(".")[0] not in allowed
    }
    assert not broken


def test_nothing_puts_a_folder_in_front_of_the_module_search_path() -> None:
    broken = []
    for package in (*PACKAGES, "benchmarks"):
        for module in modules(package):
            for node in ast.walk(ast.parse(module.read_bytes(), str(module))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "sys.path.insert":
                    broken.append(f"{module.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
                if isinstance(node, ast.Assign | ast.AugAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if any(ast.unparse(target).startswith("sys.path") for target in targets):
                        broken.append(f"{module.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not broken


def test_the_guard_sees_an_import_that_another_module_makes() -> None:
    start = ROOT / "cli" / "demo.py"
    through = {by for by, name in reached(start) if name.split(".")[0] == "fcntl"}
    assert through == {ROOT / "cli" / "stack.py"}

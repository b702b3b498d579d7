"""Whether ``package.module:function`` exists, found by reading source: user code is not run by a check."""

from __future__ import annotations

import ast
import importlib.util
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def problem(target: str, code: Path) -> str | None:
    """What is wrong with ``target``, or None. Modules are looked for on ``sys.path``, then in ``code``."""
    module, colon, function = target.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), *function.split(".")]):
        return f"{target!r} is not of the form package.module:function"
    spec = _find(module, code)
    if spec is None:
        return f"module {module!r} is neither installed nor below {code}"
    if spec.origin is None:
        return f"{module!r} is a folder without __init__.py, not a module"
    if not spec.origin.endswith(".py"):
        return None  # compiled or built in: only an import would tell
    try:
        tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except SyntaxError as error:
        return f"{spec.origin}:{error.lineno}: {error.msg}"
    bound = _names(tree)
    if bound.isdisjoint({function.split(".")[0], "*", "__getattr__"}):
        return f"{spec.origin} defines no {function!r}"
    return None


def _find(module: str, code: Path) -> ModuleSpec | None:
    """Like ``importlib.util.find_spec``, which would run the packages around a dotted name."""
    parts = module.split(".")
    spec = importlib.util.find_spec(parts[0]) or PathFinder.find_spec(parts[0], [str(code)])
    for length in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:length]), list(spec.submodule_search_locations))
    return spec


def _names(tree: ast.Module) -> set[str]:
    """Names that the module's top level may bind."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names

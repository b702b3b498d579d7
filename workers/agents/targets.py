"""Finding user code: ``package.module:function``, from our environment or the run's code folder."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage.errors import ConfigError


def add_code_folder(code: str | None) -> None:
    """Append the run's code folder to ``sys.path``: behind everything of ours, so that it can hide nothing."""
    if code is not None and code not in sys.path:
        sys.path.append(code)


def load_target(target: str, code: str | None = None) -> Callable[..., Any]:
    """Import the function that ``target`` names; :class:`ConfigError` says what is missing where."""
    module_name, colon, function_name = target.partition(":")
    if not (colon and module_name and function_name):
        raise ConfigError(f"target {target!r}: write it as package.module:function")
    add_code_folder(code)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        where = f" nor in {Path(code)}" if code else ""
        raise ConfigError(f"target {target!r}: no module {error.name!r} in this environment{where}") from error
    try:
        found: Callable[..., Any] = operator.attrgetter(function_name)(module)
    except AttributeError:
        raise ConfigError(f"target {target!r}: {module.__file__} has no function {function_name!r}") from None
    if not callable(found):
        raise ConfigError(f"target {target!r}: {function_name!r} in {module.__file__} is no function")
    return found

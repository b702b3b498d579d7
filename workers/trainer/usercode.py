"""Functions of the run file's ``algorithm`` section that are named by dotted path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from storage.errors import ConfigError
from workers.agents.targets import load_target
from workers.trainer.memory import out_of_memory
from workflows.spec import RunSpec


def load_user_code(spec: RunSpec) -> None:
    """Import what the run file names, so that a step does not find out. Raises :class:`ConfigError`."""
    for name in filter(is_target, (spec.algorithm.advantage_used, spec.algorithm.loss_used)):
        load_target(name, spec.code)


def is_target(name: str) -> bool:
    """Whether it is a dotted path, not the name of something of ours."""
    return ":" in name


def call(target: str, argument: Any) -> Any:
    """What the function gives. Raises :class:`ConfigError` that names it for all that it raises but lack of memory."""
    try:
        return _found(target)(argument)
    except Exception as error:  # the user's code may raise anything
        if out_of_memory(error):
            raise
        raise ConfigError(f"{target} raised {type(error).__name__}: {error}") from error


@functools.cache
def _found(target: str) -> Callable[[Any], Any]:
    return load_target(target)

"""Reading a run file: YAML to :class:`RunSpec`, with every error placed at its line.

Relative paths in a run file are relative to its folder; :func:`load_run`
returns them absolute, so the rest of the system never asks where it was
started.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from storage.errors import ConfigError
from workflows.spec import RunSpec

Location = tuple[str | int, ...]

PATHS: tuple[Location, ...] = (
    ("model", "path"),
    ("data", "path"),
    ("data", "held_out"),
    ("algorithm", "reference"),
    ("algorithm", "critic"),
)
"""Fields of the run file that are paths."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a run file. *Example*: ``demo.yaml:7: pipeline.steps: should be greater than 0``."""

    where: str
    """Dotted field, or empty for the file as a whole."""
    message: str
    line: int | None = None

    def text(self, file: Path) -> str:
        place = f"{file}:{self.line}" if self.line else str(file)
        return f"{place}: {self.where}: {self.message}" if self.where else f"{place}: {self.message}"


@dataclass(frozen=True)
class Document:
    """A parsed YAML file: plain data, the line of each field, and what was wrong with the YAML itself."""

    path: Path
    data: dict[str, Any]
    lines: Mapping[Location, int]
    problems: tuple[Problem, ...] = ()

    def line(self, location: Location) -> int | None:
        """Line of the field, or of the nearest section around it that the file has."""
        for length in range(len(location), 0, -1):
            if location[:length] in self.lines:
                return self.lines[location[:length]]
        return None

    def problem(self, location: Location, message: str) -> Problem:
        return Problem(dotted(location), message, self.line(location))

    def base(self) -> Path:
        """Folder that relative paths in the file are relative to."""
        return self.path.resolve().parent


class RunFileError(ConfigError):
    """A run file with one or more problems; ``str()`` lists all of them."""

    def __init__(self, file: Path, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(problem.text(file) for problem in problems))
        self.problems = tuple(problems)


def load_run(path: Path) -> RunSpec:
    """The run file at ``path`` with absolute paths.

    Raises :class:`RunFileError` that names every YAML and schema error at once.
    Whether files exist and programs can be imported is asked by ``cli.check``.
    """
    document = read_document(path)
    spec, problems = validate(document)
    if spec is None:
        raise RunFileError(path, problems)
    return spec


def read_document(path: Path) -> Document:
    """Parse the YAML at ``path``. Raises :class:`RunFileError` if it is no YAML mapping at all."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RunFileError(path, [Problem("", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise RunFileError(path, [Problem("", f"is not UTF-8 text (byte {error.start})")]) from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"not valid YAML: {error.problem or error.context}"
        raise RunFileError(path, [Problem("", message, mark.line + 1 if mark else None)]) from error
    except yaml.YAMLError as error:
        raise RunFileError(path, [Problem("", f"not valid YAML: {error}")]) from error
    if root is None or not isinstance(data, dict):
        raise RunFileError(path, [Problem("", "must be a YAML mapping with the fields of a run file")])
    lines: dict[Location, int] = {}
    problems: list[Problem] = []
    _index(root, (), lines, problems)
    return Document(path, data, lines, tuple(problems))


def validate(document: Document) -> tuple[RunSpec | None, list[Problem]]:
    """The spec with absolute paths, or None and what is wrong with it."""
    problems = list(document.problems)
    try:
        spec = RunSpec.model_validate(absolute(document.data, document.base()))
    except ValidationError as error:
        return None, problems + schema_problems(document, error)
    return (None if problems else spec), problems


def schema_problems(document: Document, error: ValidationError) -> list[Problem]:
    """Pydantic's errors with the line of each and, for unknown keys, the nearest known name."""
    found = []
    for item in error.errors(include_url=False):
        location = tuple(item["loc"])
        if item["type"] == "extra_forbidden":
            found.append(document.problem(location, unknown_key(location)))
        elif item["type"] == "missing":
            found.append(document.problem(location, "is missing"))
        else:
            message = item["msg"].removeprefix("Value error, ")
            value = "" if isinstance(item["input"], dict | list) else f" (it is {item['input']!r})"
            found.append(document.problem(location, message + value))
    return found


def unknown_key(location: Location) -> str:
    """Message for a key that the run file does not have, with the nearest name of the same section."""
    section = _section(location[:-1])
    known = sorted(section.model_fields) if section else []
    near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
    return f"unknown key; {hint}"


def absolute(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """A copy of ``data`` whose path fields are absolute; anything that is no text is left for the schema to refuse."""
    result = dict(data)
    code = result.get("code")
    if code is None or isinstance(code, str):
        result["code"] = str((base / Path(code or ".").expanduser()).resolve())
    for section, field in PATHS:
        values = result.get(str(section))
        if isinstance(values, dict) and isinstance(values.get(field), str) and values[field]:
            result[str(section)] = {**values, field: str((base / Path(values[field]).expanduser()).resolve())}
    return result


def dotted(location: Location) -> str:
    """*Example*: ``("nodes", 0, "id")`` is ``nodes[0].id``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _index(node: yaml.Node, location: Location, lines: dict[Location, int], problems: list[Problem]) -> None:
    """Note the line of every field below ``node``; a key that stands twice is a problem, since YAML keeps the last."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*location, index)] = item.start_mark.line + 1
            _index(item, (*location, index), lines, problems)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (*location, str(key.value))
            line = key.start_mark.line + 1
            if place in lines:
                problems.append(Problem(dotted(place), f"stands twice; first in line {lines[place]}", line))
            lines[place] = line
            _index(value, place, lines, problems)


def _section(location: Location) -> type[BaseModel] | None:
    """The model class that describes the mapping at ``location``."""
    model: type[BaseModel] | None = RunSpec
    for part in location:
        if model is None:
            return None
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        model = _model_in(field.annotation) if field else None
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    found = (_model_in(argument) for argument in typing.get_args(annotation))
    return next((model for model in found if model), None)

"""docs/run-file.md, made from the schema's own descriptions: ``python -m cli.reference > docs/run-file.md``."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from workflows.spec import NodeSpec, RunSpec

INTRODUCTION = """\
# The run file

One YAML file says what one training job does. `seamlessflow check run.yaml` tells everything that is wrong with it at
once, before anything starts. Unknown keys are refused. Relative paths are relative to the file's folder. The same
content as JSON is the input of the workflow `TrainingRun`, so a run can be started from the Temporal UI; paths must be
absolute there.

The smallest run file:

```yaml
run: my-run
model: {path: models/my-model}
data: {path: tasks.jsonl}
reward: {target: my_reward:score}
nodes:
  - {id: n0, tags: [rollout, train]}
```

This page is made from the schema by `python -m cli.reference`.
"""


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *_table("Top level", RunSpec)]
    for name, field in RunSpec.model_fields.items():
        model = NodeSpec if name == "nodes" else field.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            title = "`nodes`: a list of" if name == "nodes" else f"`{name}`"
            parts += _table(title, model)
    return "\n".join(parts).rstrip() + "\n"


def _table(title: str, model: type[BaseModel]) -> list[str]:
    rows = [f"## {title}", "", "| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        cells = [f"`{name}`", _kind(field.annotation), _default(field), _meaning(field)]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*rows, ""]


def _meaning(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split()).replace("``", "`")
    bounds = [
        f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(item, name, None) is not None
    ]
    return f"{text} ({', '.join(bounds)})".strip() if bounds else text


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return "see below"
    if value is None or value in ("", ()):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value}`"


def _kind(annotation: Any) -> str:
    """*Example*: ``Literal["a", "b"]`` is ``` `a` or `b` ```."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(item) for item in arguments if item is not type(None))
    if origin in (tuple, frozenset, list):
        return f"list of {_kind(arguments[0])}"
    if origin is dict or annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {str: "text", int: "integer", float: "number", bool: "`true` or `false`"}.get(annotation, str(annotation))


if __name__ == "__main__":
    print(reference(), end="")

"""The page about the run file is the schema's own."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from cli import metrics
from cli.reference import reference
from workflows.spec import NodeSpec, RunSpec

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "run-file.md").read_text()
    assert page == reference(), "run: python -m cli.reference > docs/run-file.md"


def test_every_field_of_the_run_file_is_documented() -> None:
    sections = [field.annotation for field in RunSpec.model_fields.values()]
    models = [NodeSpec, *(item for item in sections if isinstance(item, type) and issubclass(item, BaseModel))]
    silent = [
        f"{model.__name__}.{name}"
        for model in models
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert silent == []


def test_the_page_about_figures_is_up_to_date() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == metrics.reference(), "run: python -m cli.metrics > docs/metrics.md"

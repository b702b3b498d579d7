"""Markdown as the Temporal UI draws it under *Current Details*."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import quote

GAP = "\N{EM SPACE}"
"""Behind each cell: the UI draws tables without space between their columns."""
LIMIT_BYTES = 19_000
"""The server refuses details above 20,000 bytes."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table, and an empty one."""
    return [_cells(head), "| :--- " * len(head) + "|", *(_cells(row) for row in rows), ""]


def link(text: str, namespace: str, workflow: str) -> str:
    """To the page of a workflow; relative to the UI's root, where it draws the text."""
    return f"[{text}](namespaces/{quote(namespace, safe='')}/workflows/{quote(workflow, safe='')})"


def page(lines: Iterable[str]) -> str:
    """All lines, as far as they fit."""
    return "\n".join(lines).encode()[:LIMIT_BYTES].decode(errors="ignore")


def _cells(cells: Sequence[str]) -> str:
    return "".join(f"| {cell.replace('|', '/')}{GAP} " for cell in cells) + "|"

"""Child processes of one test: servers of session fixtures are children of pytest too, and not meant."""

from __future__ import annotations

import psutil

_before: set[psutil.Process] = set()


def remember() -> None:
    """Take what runs now for the surroundings of the test that begins."""
    _before.clear()
    _before.update(psutil.Process().children(recursive=True))


def started(*, recursive: bool = False) -> list[psutil.Process]:
    """Children that came since :func:`remember`."""
    return [child for child in psutil.Process().children(recursive=recursive) if child not in _before]

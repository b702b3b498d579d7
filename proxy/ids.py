"""Names for generations and engine requests: unique over all processes, of fixed length, cheap."""

from __future__ import annotations

import itertools
import uuid

_PROCESS = uuid.uuid4().hex[:20]
_count = itertools.count()


def new_id() -> str:
    """32 hexadecimal digits. Not a secret: engines match requests by prefix, so the length never changes."""
    return f"{_PROCESS}{next(_count):012x}"

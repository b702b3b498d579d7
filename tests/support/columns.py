"""What models on nodes of their own say of a batch, in tests of those who are told."""

from __future__ import annotations

from workers.trainer.messages import ColumnRef, UpdateRequest


def told(request: UpdateRequest, *columns: ColumnRef) -> UpdateRequest:
    """The request with these columns."""
    return request.model_copy(update={"columns": columns})

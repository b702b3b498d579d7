"""Work of a gang that may fail on one rank: all ranks hear of it, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from storage.errors import SeamlessFlowError, StorageError
from workers.trainer.backend import TrainingBackend

T = TypeVar("T")


class Together:
    """One rank's part; its methods are collective."""

    def __init__(self, backend: TrainingBackend) -> None:
        self._backend = backend

    def everywhere(self, what: str, work: Callable[[], T]) -> T:
        """Run on each rank; if it fails on one, it raises on all, so that none waits for another."""
        value, failure = _attempt(work)
        failures = [f for f in self._backend.gather(failure) if f is not None]
        if failures:
            raise _join(what, failures)
        return value  # type: ignore[return-value]  # no failure, so the value is what work returned

    def on_rank_0(self, what: str, work: Callable[[], T]) -> T:
        """Run on rank 0; all ranks get its value or its error."""
        outcome = _attempt(work) if self._backend.rank == 0 else (None, None)
        value, failure = self._backend.broadcast(outcome)
        if failure is not None:
            raise _join(what, [failure])
        return value  # type: ignore[return-value]  # no failure, so the value is what work returned


def _attempt(work: Callable[[], T]) -> tuple[T | None, SeamlessFlowError | None]:
    """The value, or the error in a form that can be sent to other ranks."""
    try:
        return work(), None
    except SeamlessFlowError as error:
        return None, type(error)(str(error))
    except OSError as error:
        return None, StorageError(f"{type(error).__name__}: {error}")


def _join(what: str, failures: list[SeamlessFlowError]) -> SeamlessFlowError:
    return type(failures[0])(f"cannot {what}: {failures[0]}")

"""JSON lines of every token that the engine read and wrote: the oracle for audits.

``{"rid", "input_ids", "salt", "seed", "max_new_tokens"}`` at admission, ``{"rid", "ids", "logprobs", "version"}`` for
each batch of output tokens before it is sent, ``{"rid", "finish"}`` at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from workers.engines.embedded.sequence import Sequence


class TokenLog:
    """Appends to ``path``; with None it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("ab") if path is not None else None

    def admitted(self, sequence: Sequence) -> None:
        if self._file is None or sequence.logged:
            return
        sequence.logged = True
        request = sequence.request
        self._write(
            rid=request.rid,
            input_ids=request.ids,
            salt=request.salt,
            seed=sequence.seed,
            max_new_tokens=request.max_new_tokens,
        )

    def sampled(self, sequence: Sequence) -> None:
        """Log the pending tokens, which are all of one version."""
        if self._file is None or not sequence.pending_ids:
            return
        self._write(
            rid=sequence.request.rid,
            ids=sequence.pending_ids,
            logprobs=sequence.pending_logprobs,
            version=sequence.spans.runs[-1][0],
        )

    def finished(self, sequence: Sequence, kind: str) -> None:
        if self._file is not None and sequence.logged:
            self._write(rid=sequence.request.rid, finish=kind)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, **record: Any) -> None:
        if self._file is not None:
            self._file.write(orjson.dumps(record) + b"\n")

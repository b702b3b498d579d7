"""Every error that this project raises on purpose, in one tree.

    SeamlessFlowError
    ├── ConfigError                 the run file, a flag or the environment is wrong; nothing was started
    ├── FencedError                 the caller's epoch, attempt or lineage is out of date (invariant I5)
    ├── NotFoundError               a run, session, object or version that does not exist
    ├── DeadlineError               a named wait reached its deadline (invariant I7)
    ├── StorageError                the object store or the database failed
    │   └── IntegrityError          bytes do not match their digest, or books do not balance
    ├── EngineError                 an inference engine failed
    │   ├── EngineUnavailable       no connection, or the stream broke: the generation can continue elsewhere
    │   ├── EngineRejected          the engine refused the request (bad input); a retry gives the same answer
    │   ├── CannotContinue          a cut generation whose sampling features cannot move to another engine
    │   └── EngineProtocolError     the engine's answer breaks the contract (lengths, ids, log-probs)
    ├── RequestError                an agent's request cannot be served; mapped to its dialect at the edge
    │   ├── InvalidRequest          a field has a wrong value
    │   ├── UnsupportedParameter    a parameter that the proxy does not support: refused, never ignored
    │   ├── ContextLengthExceeded   the prompt does not fit
    │   ├── RequestTooLarge         the body is longer than the proxy reads
    │   ├── LimitReached            the session has used its turns, tokens or time
    │   ├── PreviousResponseNotFound  the answer to go on from is unknown or was not stored
    │   ├── AuthenticationFailed    no key, an unknown key, or a key of another session
    │   └── SessionClosed           the session's attempt has ended
    ├── TrainerError                a training process failed
    │   ├── GangLost                a rank died: the gang restarts from the last checkpoint
    │   ├── BadBatch                a loss or gradient is no finite number; the weights are as before the step
    │   └── OutOfMemory             a rank had too little memory: the same settings would fail again
    └── RewardError                 the user's reward raised, hung or returned something that is no finite number

Errors carry a message that names the value, the place and what to do. They are
mapped to HTTP or Temporal failures only at the edge.
"""

from __future__ import annotations


class SeamlessFlowError(Exception):
    """Root of the tree. ``str(error)`` is fit to be shown to a user."""


class ConfigError(SeamlessFlowError):
    """The run file, a flag or the environment is wrong; nothing was started."""


class FencedError(SeamlessFlowError):
    """The caller's epoch, attempt or lineage is out of date (I5)."""


class NotFoundError(SeamlessFlowError):
    """A run, session, object or version that does not exist."""


class DeadlineError(SeamlessFlowError):
    """A named wait reached its deadline (I7)."""


class StorageError(SeamlessFlowError):
    """The object store or the database failed."""


class IntegrityError(StorageError):
    """Bytes do not match their digest, or books do not balance."""


class EngineError(SeamlessFlowError):
    """An inference engine failed."""


class EngineUnavailable(EngineError):
    """No connection, or the stream broke: the generation can continue elsewhere."""


class EngineRejected(EngineError):
    """The engine refused the request; a retry gives the same answer."""


class CannotContinue(EngineError):
    """A cut generation whose sampling features (grammar, penalties) cannot move to another engine."""


class EngineProtocolError(EngineError):
    """The engine's answer breaks the contract (lengths, ids, log-probs)."""


class RequestError(SeamlessFlowError):
    """An agent's request cannot be served.

    ``param`` names the request field at fault, if there is one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field has a wrong value."""


class UnsupportedParameter(RequestError):
    """A parameter that the proxy does not support: refused, never ignored."""


class ContextLengthExceeded(RequestError):
    """The prompt does not fit into the model's context. Both sizes are in tokens; 0: not known."""

    def __init__(self, message: str, *, param: str | None = None, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.limit = limit


class RequestTooLarge(RequestError):
    """The body is longer than the proxy reads."""


class LimitReached(RequestError):
    """The session has used its turns, tokens or time."""


class PreviousResponseNotFound(RequestError):
    """The answer that a request goes on from is unknown or was not stored."""


class AuthenticationFailed(RequestError):
    """No key, an unknown key, or a key of another session."""


class SessionClosed(RequestError):
    """The session's attempt has ended."""


class TrainerError(SeamlessFlowError):
    """A training process failed."""


class GangLost(TrainerError):
    """A rank died: the gang restarts from the last checkpoint."""


class BadBatch(TrainerError):
    """A loss or gradient is no finite number; the weights are as before the step, and another try gives the same."""


class OutOfMemory(TrainerError):
    """A rank had too little memory for a step: the same settings would fail again."""


class RewardError(SeamlessFlowError):
    """The user's reward raised, hung or returned something that is no finite number."""

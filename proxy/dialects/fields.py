"""What dialects share: reading typed fields of a JSON body, refusing by name, the classes of errors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import orjson

from storage import errors


def read_object(body: bytes) -> dict[str, Any]:
    """The request body; raises InvalidRequest unless it is a JSON object."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise errors.InvalidRequest(f"the request body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise errors.InvalidRequest("the request body must be a JSON object")
    try:
        orjson.dumps([[[[data]]]])  # what it reads may be nested more deeply than it can write; a journal nests it more
    except orjson.JSONEncodeError:
        raise errors.InvalidRequest("the request body is nested too deeply") from None
    return data


def check_parameters(
    data: Mapping[str, Any], *, read: Collection[str], labels: Collection[str], neutral: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Refuse what has no support; returns the labels.

    ``read`` are names that the dialect reads itself, ``labels`` those that are only recorded, ``neutral`` those of
    which only some values are supported: they ask for nothing beyond the default. A null asks for nothing.
    """
    found = {}
    for name, value in data.items():
        if name in read or value is None:
            continue
        if name in labels:
            found[name] = value
        elif name not in neutral:
            raise errors.UnsupportedParameter(f"{name} is not supported by this server: leave it out", param=name)
        elif not any(_same(value, allowed) for allowed in neutral[name]):
            allowed = " or ".join(orjson.dumps(value).decode() for value in neutral[name])
            raise errors.UnsupportedParameter(
                f"{name}={orjson.dumps(value).decode()[:80]} is not supported by this server, only {allowed}",
                param=name,
            )
    return found


def _same(value: Any, neutral: Any) -> bool:
    # In Python True == 1, in JSON it is not.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def optional(data: Mapping[str, Any], name: str, kind: type) -> Any:
    """The value of type ``kind`` or None."""
    value = data.get(name)
    if value is None:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise errors.InvalidRequest(f"{name} must be of type {kind.__name__}, not {type(value).__name__}", param=name)
    return value


def positive(data: Mapping[str, Any], name: str, *, most: int | None = None) -> int | None:
    """An integer of at least 1 (and at most ``most``) or None."""
    value: int | None = optional(data, name, int)
    if value is not None and not 1 <= value <= (most or value):
        raise errors.InvalidRequest(
            f"{name} is {value}: must be at least 1" + (f" and at most {most}" if most else ""), param=name
        )
    return value


def number(data: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A number from ``low`` to ``high`` or None."""
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise errors.InvalidRequest(f"{name} must be a number from {low:g} to {high:g}", param=name)
    return float(value)


def seed_of(data: Mapping[str, Any]) -> int | None:
    """``seed``: engines take 63 bits."""
    value: int | None = optional(data, "seed", int)
    if value is not None and not -(2**63) <= value < 2**63:
        raise errors.InvalidRequest("seed must be a 64-bit integer", param="seed")
    return value


def stops(value: Any, name: str = "stop") -> tuple[str, ...]:
    """Stop strings: none, one, or a list of them."""
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(stop, str) and stop for stop in found):
        raise errors.InvalidRequest(f"{name} must be a non-empty string or a list of them", param=name)
    return tuple(found)


CLASSES: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (errors.ContextLengthExceeded, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.UnsupportedParameter, 400, "invalid_request_error", "unsupported_parameter"),
    (errors.PreviousResponseNotFound, 404, "invalid_request_error", "previous_response_not_found"),
    (errors.RequestTooLarge, 413, "invalid_request_error", "request_too_large"),
    (errors.LimitReached, 400, "invalid_request_error", "session_limit"),
    (errors.AuthenticationFailed, 401, "invalid_request_error", "invalid_api_key"),
    (errors.SessionClosed, 403, "invalid_request_error", "session_closed"),
    (errors.RequestError, 400, "invalid_request_error", None),
    (errors.EngineRejected, 400, "invalid_request_error", "engine_rejected"),
    (errors.NotFoundError, 404, "invalid_request_error", "not_found"),
    (errors.DeadlineError, 504, "server_error", "deadline"),
    (errors.SeamlessFlowError, 500, "server_error", "infrastructure"),
)
"""First match counts. Server errors are final: their generation is over, a retry would only wait again."""


def classify(error: Exception) -> tuple[int, str, str | None]:
    """(HTTP status, OpenAI's error type, code) of an error."""
    for kind, status, name, code in CLASSES:
        if isinstance(error, kind):
            return status, name, code
    return 500, "server_error", "internal"


def error_param(error: Exception) -> str | None:
    """The request field at fault, in OpenAI's words."""
    if isinstance(error, errors.ContextLengthExceeded):
        return "messages"
    return error.param if isinstance(error, errors.RequestError) else None


def openai_error(error: Exception) -> tuple[int, bytes]:
    """Status and body in the shape that all of OpenAI's APIs share."""
    status, kind, code = classify(error)
    detail = {"message": str(error), "type": kind, "param": error_param(error), "code": code}
    return status, orjson.dumps({"error": detail})

"""SGLang's errors as ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_worker_ext.errors import EngineError, RequestError, WorkerExtError


def as_ours(error: Exception) -> WorkerExtError:
    """The error of ours that says the same as what ``async_generate`` raised for a request."""
    return RequestError(str(error))


def of_abort(finish_reason: Mapping[str, Any]) -> WorkerExtError | None:
    """The error that a request ended with, None if it was only cancelled.

    Args:
        finish_reason: of type ``abort``.
    """
    status = finish_reason.get("status_code")
    if status is None and finish_reason.get("err_type") is None:
        return None
    message = str(finish_reason.get("message") or "SGLang ended the request with an error")
    status = int(getattr(status, "value", status) or 500)
    if 400 <= status < 500:
        error = RequestError(message)
        error.status = status
        return error
    return EngineError(message)

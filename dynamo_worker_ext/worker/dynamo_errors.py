"""Our errors as Dynamo's, so that a frontend does the right thing about them."""

from __future__ import annotations

import json

from dynamo.llm import exceptions as dynamo_errors

from dynamo_worker_ext.errors import (
    EngineDeadError,
    EngineError,
    HandoffError,
    MediaLostError,
    RequestError,
    WorkerExtError,
)


def to_dynamo_error(error: WorkerExtError, *, chat_processor: bool) -> Exception:
    """The exception of Dynamo's that makes a frontend do the right thing about `error`.

    Args:
        error: one of ours.
        chat_processor: the request came through a Python chat processor, which (1.6.1) makes a
            500 of every error whose text does not carry a status in the form used here; the Rust
            preprocessor in turn would show that form to the client as it is.
    """
    text = str(error)
    kind: type[Exception]
    if isinstance(error, RequestError):
        kind, status = dynamo_errors.InvalidArgument, error.status
        if status != 400 and not chat_processor:
            http_error: Exception = dynamo_errors.HttpError(status, text)
            return http_error
    elif isinstance(error, HandoffError) and error.reason != "kv":
        # Of no use to be retried elsewhere. An error that says so has the router (1.6.1) take this
        # worker for lost, and answer 503 to all for a while.
        if not chat_processor:
            unavailable: Exception = dynamo_errors.HttpError(503, text)
            return unavailable
        kind, status = dynamo_errors.InvalidArgument, 503
    elif isinstance(error, (MediaLostError, HandoffError)):
        # Retried on another worker where --migration-limit allows it, as are the next two.
        kind, status = dynamo_errors.CannotConnect, 503
    elif isinstance(error, EngineDeadError):
        kind, status = dynamo_errors.EngineShutdown, 503
    elif isinstance(error, EngineError):
        kind, status = dynamo_errors.StreamIncomplete, 503
    else:
        kind, status = dynamo_errors.Unknown, 500
    return kind(_with_status(status, text) if chat_processor else text)


def _with_status(status: int, message: str) -> str:
    # Source: dynamo.frontend.utils.backend_invalid_argument_to_http_error, 1.6.1.
    return "BackendInvalidArgument: " + json.dumps({"message": message, "code": status})

"""vLLM's errors as ours."""

from __future__ import annotations

from typing import Final

from vllm.exceptions import GracefulHTTPError, VLLMNotFoundError, VLLMUnprocessableEntityError
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError
from vllm.v1.engine.exceptions import EngineGenerateError

from dynamo_worker_ext.errors import (
    EngineBusyError,
    EngineDeadError,
    EngineError,
    RequestError,
    WorkerExtError,
)

#: What ``AsyncLLM.generate`` raises when the engine, not the request, is at fault; the last where
#: it takes no more for now.
ENGINE_ERRORS: Final[tuple[type[Exception], ...]] = (
    VllmEngineDeadError,
    EngineGenerateError,
    GracefulHTTPError,
)


def as_ours(error: Exception) -> WorkerExtError:
    """The error of ours that says the same.

    Args:
        error: a client error of vLLM's, one of `ENGINE_ERRORS`, or a `ValueError` from processing
            the request's media.
    """
    if isinstance(error, VllmEngineDeadError):
        return EngineDeadError(f"the engine died: {error}")
    if isinstance(error, GracefulHTTPError):  # --max-num-queued-reqs, --max-num-queued-tokens
        return EngineBusyError(str(error))
    if isinstance(error, EngineGenerateError):
        # It wraps whatever went wrong on the way in; a ValueError there is the request's fault.
        cause = error.__cause__
        if not isinstance(cause, ValueError):
            return EngineError(f"the engine failed: {cause or error}")
        error = cause
    result = RequestError(str(error))
    if isinstance(error, VLLMNotFoundError):
        result.status = 404
    elif isinstance(error, VLLMUnprocessableEntityError):
        result.status = 422
    return result

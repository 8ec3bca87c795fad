"""The one error tree of dynamo-worker-ext.

```
WorkerExtError
├── StartupError             this worker cannot serve as it was started
├── RequestError             the client asked for what cannot be had (HTTP 400)
│   ├── LimitExceededError       more items than --limit-mm-per-prompt allows
│   ├── UnsupportedOptionError   an option that the engine cannot honour
│   ├── StrayPlaceholderError    a media token without media
│   └── MediaLoadError           raw media that could not be fetched or decoded
├── TransferError            pre-processed media did not arrive; carries a `reason`
│   ├── InvalidTransferError     metadata or payload is malformed (`invalid_*`)
│   ├── SegmentError             a segment is missing, stale, short or foreign (`segment_*`)
│   ├── PeerError                a NIXL peer is dead or not what it says (`peer_*`)
│   ├── TransferTimeoutError     the deadline passed (`timeout`)
│   └── TransportUnavailableError  this worker does not take that transport (`unavailable`)
├── MediaLostError           media did not arrive and cannot be processed here either
├── HandoffError             decode cannot go on from what prefill left; carries a `reason`
├── EngineError              the engine failed
│   ├── EngineDeadError          it is gone; the worker leaves
│   ├── EngineBusyError          it has its fill of requests; another worker may have room
│   └── CacheMissError           an item was evicted between check and submit; resend once
└── PatchingError            the patches of an engine cannot be looked at or applied
    ├── PatchFormatError         a manifest or patch of this package is malformed
    ├── EngineMissingError       the engine is not installed there
    └── PatchRefusedError        the engine's files may not be changed; none was
```

Errors are raised where the fault is found, and say what was expected, what came and what to do.
One place, `worker.to_dynamo_error`, decides what a client sees.
"""

from __future__ import annotations

from collections.abc import Sequence


class WorkerExtError(Exception):
    """Base of every error that this package raises on purpose."""


class StartupError(WorkerExtError):
    """The worker cannot serve as it was started; the message says what to change."""


class RequestError(WorkerExtError):
    """The client asked for something that cannot be had.

    Attributes:
        status: the HTTP status that a frontend should answer with.
    """

    status = 400


class LimitExceededError(RequestError):
    """A request names more items of one modality than ``--limit-mm-per-prompt`` allows."""


class UnsupportedOptionError(RequestError):
    """A request carries an option that the engine cannot honour."""


class StrayPlaceholderError(RequestError):
    """A token that only stands for media is in a prompt without that media."""


class MediaLoadError(RequestError):
    """Raw media could not be fetched or decoded.

    Args:
        message: what was asked for and what happened.
        status: the HTTP status of the cause where it has one (404, 413, 415, ...).
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class TransferError(WorkerExtError):
    """Pre-processed media did not arrive.

    Args:
        message: what was expected and what came.
        reason: a short label from a fixed set; the ``reason`` of the metric and of the log line.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class InvalidTransferError(TransferError):
    """Metadata or payload of a transfer is malformed.

    Every reason starts with ``invalid_``: ``invalid_metadata``, ``invalid_hash``,
    ``invalid_size``, ``invalid_name``, ``invalid_count``, ``invalid_placeholder``,
    ``invalid_tokens``, ``invalid_frame`` (truncated or over-long), ``invalid_pickle``,
    ``invalid_slot`` (a place in an arena that its sender never gave), ``invalid_type``.
    """


class SegmentError(TransferError):
    """A shared-memory segment or arena slot cannot be read or written.

    ``segment_missing``, ``segment_stale`` (a slot that was withdrawn), ``segment_short``,
    ``segment_foreign`` (another user's, or not what it should be), ``segment_refused`` (the
    operating system refused for another reason, such as too many open files), ``segment_full``
    (a sender found no room).
    """


class PeerError(TransferError):
    """A NIXL peer cannot be read from, or what it sent is not what it offered.

    ``peer_dead`` (gone, or not to be reached from here), ``peer_refused`` (its metadata or address
    is not accepted), ``peer_stale`` (it has taken the item back), ``peer_corrupt`` (the bytes are
    not those that it offered).
    """


class TransferTimeoutError(TransferError):
    """A transfer did not finish before its deadline (``timeout``)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="timeout")


class TransportUnavailableError(TransferError):
    """This worker does not take the transport that the sender used (``unavailable``)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="unavailable")


class MediaLostError(WorkerExtError):
    """Media did not arrive and the request carries no raw media to fall back to.

    A frontend may try another worker. An answer without the media is never given.

    Args:
        message: what was lost and why.
        reason: the label of the transfer error behind it.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class HandoffError(WorkerExtError):
    """Decode cannot go on from what a prefill worker left; a frontend may begin anew.

    The prompt is never computed again without its media instead.

    Args:
        message: what was expected and what came.
        reason: ``missing`` (no prefill worker took part), ``invalid`` (malformed), ``kv`` (the KV
            could not be had or was given up, as when its prefill worker died).
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineError(WorkerExtError):
    """The engine failed while serving a request."""


class EngineDeadError(EngineError):
    """The engine is gone. The worker leaves discovery and exits."""


class EngineBusyError(EngineError):
    """The engine is well but takes no more requests for now; a frontend may try another worker."""


class CacheMissError(EngineError):
    """The engine no longer holds items that it held when they were checked.

    Args:
        mm_hashes: the items that are to be sent again.
    """

    def __init__(self, mm_hashes: Sequence[str]) -> None:
        super().__init__(f"the engine no longer holds {len(mm_hashes)} item(s)")
        self.mm_hashes = tuple(mm_hashes)


class PatchingError(WorkerExtError):
    """The patches of an engine cannot be looked at or applied."""


class PatchFormatError(PatchingError):
    """A manifest or patch of this package is malformed; a defect of the package."""


class EngineMissingError(PatchingError):
    """The engine is not installed where it was looked for."""


class PatchRefusedError(PatchingError):
    """The engine's files may not, or cannot, be changed; all are as they were before."""

"""The SDK's context, for tests that call a worker without the SDK."""

from __future__ import annotations

import itertools


class Context:
    """What a worker uses of it."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._id = f"test-{next(self._numbers)}"

    def id(self) -> str:
        return self._id

    def is_stopped(self) -> bool:
        return False

    def trace_headers(self) -> None:
        return None

"""Have torch give plain memory where pinned memory is asked for, which needs a GPU.

SGLang (0.5.21) pins what its LoRA layers use, on a CPU too. Imported by `tests.counted_worker`
where ``DWE_TESTS_UNPINNED`` is set. Computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _plain(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*args, **options)

    return call


for _name in ("tensor", "zeros", "empty"):
    setattr(torch, _name, _plain(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]

"""The scheduler of a decode engine: it computes no media, as it has none. Lives in the core.

A decode engine takes each prompt's KV from a prefill worker and of its media only a few numbers.
Should a prompt have to be computed here after all (its KV did not fit any more and was given up,
or the connector found none), vLLM (0.31.0) would hand these numbers to the vision encoder, which
fails and takes the engine with it. Here such a request ends with an error instead, and a frontend
may begin it anew. Goes away with a connector or a policy of vLLM's that fails these requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import SchedulerConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.request import Request

# vLLM's processes log by its own loggers only.
log = init_logger(f"vllm.{__name__}")


class DecodeScheduler(Scheduler):
    """For an engine without asynchronous scheduling."""

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int,
        encoder_compute_budget: int, *args: Any, **kwargs: Any,
    ) -> tuple[list[int], int, int, list[int]]:  # fmt: skip
        scheduled: tuple[list[int], int, int, list[int]] = super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, num_new_tokens, encoder_compute_budget, *args, **kwargs
        )
        if not scheduled[0]:
            return scheduled
        log.warning(
            "request %s needs the media of its prompt, which only prefill had; ending it",
            request.request_id,
        )
        # Requests in this set end with an error after the step; vLLM has it for items whose size
        # differs from that of the encoder's output.
        self.encoder_cache_mismatch_reqs.add(request.request_id)
        return [], 0, encoder_compute_budget, []


class AsyncDecodeScheduler(DecodeScheduler, AsyncScheduler):
    """For an engine with it."""


def have_no_media(config: SchedulerConfig) -> None:
    """Have an engine that is about to start schedule so.

    Raises:
        ValueError: the operator asked for another scheduler.
    """
    if config.scheduler_cls is not None:
        raise ValueError("--scheduler-cls: a decode worker has a scheduler of its own")
    chosen = AsyncDecodeScheduler if config.async_scheduling else DecodeScheduler
    config.scheduler_cls = f"{__name__}.{chosen.__qualname__}"

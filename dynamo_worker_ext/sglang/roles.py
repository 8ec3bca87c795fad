"""SGLang workers that share requests: one begins each, another continues it.

The engines move the KV cache themselves (``--disaggregation-transfer-backend``). They meet at the
prefill worker's bootstrap server under a number, the room, and each half waits for the other.

Dynamo can send a request to both at once, where the card names a bootstrap address. This card
names none, on purpose: a decode worker would then have nothing but the frontend's request, in which
the sizes of images are missing, and so would have to fetch and process the media once more. Here
the prefill worker answers as soon as it has processed the media, with what the decode worker needs
(`dynamo_worker_ext.sglang.handoff`), and goes on with its half in the background: the two halves
overlap all the same. It also keeps an address out of the card that differs at each start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from dynamo.common.backend.health_check import (
    bos_token_id_or,
    build_health_check_payload,
    is_probe,
)
from dynamo.common.constants import DisaggregationMode
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.utils.network import get_local_ip_auto

from dynamo_worker_ext import wire
from dynamo_worker_ext.errors import (
    EngineDeadError,
    EngineError,
    HandoffError,
    MediaLostError,
    StartupError,
    UnsupportedOptionError,
    WorkerExtError,
)
from dynamo_worker_ext.ingest import Outcome, Resolution, Unread
from dynamo_worker_ext.sglang.args import Config
from dynamo_worker_ext.sglang.handler import SglangWorker, new_request_id
from dynamo_worker_ext.sglang.handoff import HandedMedia, Handoff, parse_handoff
from dynamo_worker_ext.sglang.media import EngineInput, SglangMedia
from dynamo_worker_ext.sglang.sampling import Bootstrap, EngineCall
from dynamo_worker_ext.sglang.tokenized import announce, attach, media_of
from dynamo_worker_ext.worker.main import check_port

log = logging.getLogger(__name__)

_ANY_HOST: Final = ("", "0.0.0.0", "::")  # noqa: S104 - what SGLang's --host may say


def make_worker(config: Config) -> SglangWorker:
    """The worker of the role that the command line names."""
    return _WORKERS[config.worker.disaggregation_mode](config)


class _HalfWorker(SglangWorker):
    """What both halves have in common."""

    def build_call(
        self, request: Mapping[str, Any], trace_headers: Mapping[str, str] | None
    ) -> EngineCall:
        call = super().build_call(request, trace_headers)
        # SGLang would expand it into several requests that all wait for one KV cache.
        if call.n > 1:
            raise UnsupportedOptionError(
                "n above 1 cannot be honoured where prefill and decode workers share requests"
            )
        if call.logprob_start_len >= 0:
            raise UnsupportedOptionError(
                "prompt_logprobs cannot be honoured where prefill and decode workers share "
                "requests: the prefill worker's are not moved with the KV cache"
            )
        if is_probe(request):
            # The engine then waits for nobody.
            return replace(call, bootstrap=Bootstrap(FAKE_BOOTSTRAP_HOST, 0, secrets.randbits(32)))
        return call


class PrefillWorker(_HalfWorker):
    """Begins requests: processes their media, computes the KV cache, and hands over."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._announced: dict[str, asyncio.Future[Any]] = {}
        self._halves: set[asyncio.Task[None]] = set()

    async def _start(self, worker_id: int) -> Any:
        args = self._config.engine_args
        port, flag = args.disaggregation_bootstrap_port, "--disaggregation-bootstrap-port"
        # SGLang 0.5.21 only logs that it is taken, and then registers with the one who has it.
        check_port(port, args.host, f"bootstrap port {port}", flag)
        return await super()._start(worker_id)

    async def _open_media(self, media: SglangMedia) -> None:
        manager, settings = self._engine.tokenizer_manager, self._settings
        if not manager.bootstrap_server.thread.is_alive():
            raise StartupError(
                "SGLang's bootstrap server did not start; see its message above, and "
                "--disaggregation-bootstrap-port"
            )
        self._port = settings.disaggregation_bootstrap_port
        self._host = get_local_ip_auto() if settings.host in _ANY_HOST else settings.host
        log.info("decode workers find this worker at %s port %d (--host)", self._host, self._port)
        await super()._open_media(media)
        announce(manager, self._announced)

    async def _routes_exactly(self) -> bool:
        # To be seen in the events a prompt would have to be fetched by a decode worker, which a
        # prefill worker has not got when it starts; the probe of the padded ids has to do.
        return self._support.exact

    def build_call(
        self, request: Mapping[str, Any], trace_headers: Mapping[str, str] | None
    ) -> EngineCall:
        call = super().build_call(request, trace_headers)
        params = {**call.sampling_params, "max_new_tokens": 1}
        if "min_new_tokens" in params:
            params["min_new_tokens"] = min(params["min_new_tokens"], 1)
        if call.bootstrap is None:
            room, ranks = secrets.randbits(62), self._settings.dp_size
            if call.data_parallel_rank is not None:
                # The decode worker's engine asks that rank for it.
                room += call.data_parallel_rank - room % ranks
            call = replace(call, bootstrap=Bootstrap(self._host, self._port, room))
        return replace(call, sampling_params=params)

    async def run(
        self, prompt: EngineInput, call: EngineCall, context: Any, *, may_resend: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        bootstrap = call.bootstrap
        if bootstrap is None or bootstrap.host == FAKE_BOOTSTRAP_HOST:
            async for chunk in super().run(prompt, call, context, may_resend=may_resend):
                yield chunk
            return
        if self.engine_is_dead():
            raise EngineDeadError("the engine died")
        rid = new_request_id()
        announced = self._announced[rid] = asyncio.get_running_loop().create_future()
        half = asyncio.create_task(self._half(prompt, call, context, rid), name=f"prefill-{rid}")
        self._halves.add(half)
        half.add_done_callback(self._halves.discard)
        try:
            await asyncio.wait({announced, half}, return_when=asyncio.FIRST_COMPLETED)
            if not announced.done():
                await half  # raises what kept it from being begun
                raise EngineError("the engine ended the request before it began")
            handoff = Handoff(*bootstrap, media=media_of(announced.result()))
        except BaseException:
            self._engine.tokenizer_manager.abort_request(rid)
            half.cancel()
            raise
        finally:
            del self._announced[rid]
        half.add_done_callback(self._say_failure)
        yield {
            "token_ids": [],
            "index": 0,
            # With any other the frontend takes this for the whole answer.
            "finish_reason": "length",
            "disaggregated_params": handoff.to_params(),
        }

    async def _half(self, prompt: EngineInput, call: EngineCall, context: Any, rid: str) -> None:
        """This worker's half, to its end: the KV cache was taken. Counts as in flight until then.

        Raises:
            WorkerExtError: the engine failed, or nobody took it.
        """
        with self._serving():
            async with contextlib.aclosing(self._answer(prompt, call, context, rid)) as chunks:
                async for _ in chunks:
                    pass

    def _say_failure(self, half: asyncio.Task[None]) -> None:
        """Its client hears of it from the decode worker, which then waits in vain."""
        if half.cancelled() or (error := half.exception()) is None:
            return
        if isinstance(error, WorkerExtError):
            self._warn(type(error).__name__, "a prefill was not taken: %s", error)
        else:
            log.error("a prefill failed", exc_info=error)

    async def _stop(self) -> None:
        for half in list(self._halves):
            half.cancel()
        await asyncio.gather(*self._halves, return_exceptions=True)
        await super()._stop()


class Continuation(NamedTuple):
    """What a decode worker gives its engine.

    Attributes:
        token_ids: the prompt as the KV cache has it.
        handoff: None for the health check, which continues nothing.
    """

    token_ids: list[int]
    handoff: Handoff | None


class DecodeWorker(_HalfWorker):
    """Continues requests that a prefill worker has begun. Never sees their media."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._handed: dict[str, HandedMedia] = {}

    async def _open_media(self, media: SglangMedia) -> None:
        self._exact = False
        attach(self._engine.tokenizer_manager, self._handed)

    def _kv_events_config(self) -> str | None:
        # Dynamo's router chooses decode workers by their load.
        self._kv_events = None
        return None

    def _canary_request(self) -> dict[str, Any]:
        tokenizer = self._engine.tokenizer_manager.tokenizer
        payload: dict[str, Any] = build_health_check_payload(bos_token_id_or(tokenizer))
        return payload

    async def _prepare(
        self,
        request: Mapping[str, Any],
        media: wire.MediaRequest,
        call: Any,
        unread: Unread,
        *,
        resend: bool,
    ) -> tuple[Any, Resolution]:
        if is_probe(request):
            return Continuation(list(media.token_ids), None), Resolution(Outcome.TEXT)
        vocabulary = self._engine.tokenizer_manager.model_config.vocab_size
        handoff = parse_handoff(request, vocabulary=vocabulary)
        if handoff.media is not None:
            unread.clear()  # prefill has seen to it
            return (
                Continuation(handoff.media.token_ids, handoff),
                Resolution(Outcome.CONTINUED),
            )
        if media.raw or media.transfer is not None or media.transfer_error is not None:
            raise MediaLostError(
                "the request carries media, but its prefill worker handed over a prompt without",
                reason="handoff",
            )
        tokens = self._media.from_text(media)["input_ids"]
        return Continuation(tokens, handoff), Resolution(Outcome.TEXT)

    async def run(
        self, prompt: Continuation, call: EngineCall, context: Any, *, may_resend: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        if self.engine_is_dead():
            raise EngineDeadError("the engine died")
        rid, handoff = new_request_id(), prompt.handoff
        if handoff is not None:
            call = replace(call, bootstrap=handoff.bootstrap)
            if handoff.media is not None:
                self._handed[rid] = handoff.media
        begun = False
        try:
            given = {"input_ids": prompt.token_ids}
            async for chunk in self._answer(given, call, context, rid):
                begun = True
                yield chunk
        except EngineError as error:
            if begun or self._closing or self.engine_is_dead():
                raise
            # Until its first token this half does nothing but wait for the other one's KV cache.
            raise HandoffError(f"the KV cache did not come: {error}", reason="kv") from error
        finally:
            self._handed.pop(rid, None)


_WORKERS: Final[Mapping[DisaggregationMode, type[SglangWorker]]] = {
    DisaggregationMode.AGGREGATED: SglangWorker,
    DisaggregationMode.PREFILL: PrefillWorker,
    DisaggregationMode.DECODE: DecodeWorker,
}

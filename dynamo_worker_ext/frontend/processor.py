"""Dynamo's vLLM processor (1.6.1), which sends media our way. Lives in the frontend process.

Upstream's processor renders the request; what is replaced is where it puts the processed items:
`SendingProcessor` offers them over what the workers' cards say they can read, several modalities
at once where the transport can, and leaves the raw media in the request unless it is certain.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

from dynamo.frontend import vllm_processor
from dynamo.llm import FpmEventSubscriber
from dynamo.runtime import DistributedRuntime
from vllm.v1.serial_utils import MsgpackEncoder

from dynamo_worker_ext import transfer, wire
from dynamo_worker_ext.card import WorkerCard, disagreements, host_identity
from dynamo_worker_ext.errors import StartupError, TransferError
from dynamo_worker_ext.frontend.plan import plan
from dynamo_worker_ext.metrics import WarnOnceAMinute
from dynamo_worker_ext.transfer import MmKwargsSender, codec

log = logging.getLogger(__name__)

_cards: ContextVar[Cards] = ContextVar("cards")


class Cards:
    """The cards of a model's workers, as discovery has them now.

    Args:
        endpoint: ``namespace.component.endpoint`` of the workers.
    """

    def __init__(self, endpoint: str) -> None:
        # Dynamo's only watch on the cards of all workers that Python can read.
        self._watch = FpmEventSubscriber(DistributedRuntime.detached().endpoint(endpoint))
        self._watch.start_tracking()
        self._seen: dict[str, WorkerCard] = {}
        self._warn = WarnOnceAMinute(log)

    def of(self, worker_id: object = None) -> list[WorkerCard]:
        """The card of one worker if it is known, else those of all."""
        found = self._watch.get_model_cards()
        if self._seen.keys() != found.keys():
            self._seen = {
                worker: self._seen.get(worker) or self._read(worker, raw)
                for worker, raw in found.items()
            }
            for one in disagreements(self._seen):
                log.warning("%s; media is not routed exactly", one)
        chosen = self._seen.get(str(worker_id))
        return list(self._seen.values()) if chosen is None else [chosen]

    def _read(self, worker: str, raw: str) -> WorkerCard:
        data = json.loads(raw).get("runtime_config", {}).get("runtime_data", {})
        try:
            return WorkerCard.from_runtime_data(data, worker)
        except StartupError as error:
            self._warn("card", "%s; nothing is sent to it but raw media", error)
            return WorkerCard("vllm")


class Outbox:
    """Offers items and withdraws them. One a frontend.

    Args:
        mode: one of `plan.MODES`.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._host_id = host_identity()
        self._usable = [name for name in transfer.usable() if mode in ("auto", name)]
        if mode not in ("auto", *self._usable):
            raise StartupError(
                f"DYNAMO_MM_TRANSFER={mode}: this transport cannot be used here; there is "
                f"{', '.join(transfer.usable()) or 'none'}"
            )
        self._senders: dict[str, MmKwargsSender[Any]] = {}
        self._opening: dict[str, asyncio.Task[MmKwargsSender[Any]]] = {}
        self._warn = WarnOnceAMinute(log)

    async def offer(
        self, features: Sequence[Any], cards: Sequence[WorkerCard]
    ) -> tuple[dict[str, Any], list[tuple[str, Sequence[Any]]], bool]:
        """Offer the items of one request over what its workers can read.

        Returns:
            What belongs into ``extra_args``, what `cleanup` is to be given, and whether the
            request can do without its raw media.
        """
        modalities = [str(feature.modality) for feature in features]
        hashes = [str(feature.mm_hash) for feature in features]
        if any(feature.data is None for feature in features):
            return {}, [], False
        payloads = [codec.frame(MsgpackEncoder().encode(feature.data)) for feature in features]
        largest = max(codec.payload_size(pieces) for pieces in payloads)
        # Dynamo's own metadata names one modality for all items.
        mixed = len(set(modalities)) > 1
        usable = [name for name in self._usable if name in wire.NAMES_ITEMS or not mixed]
        offered: dict[str, Sequence[Any]] = {}
        try:
            while True:
                chosen = plan(self._mode, cards, self._host_id, usable=usable, item_bytes=largest)
                name = next((name for name in chosen.transports if name not in offered), None)
                if name is None:
                    break
                try:
                    offered[name] = await (await self._sender(name)).offer(payloads)
                except TransferError as error:
                    # Such as an arena that is full: the next best will do.
                    usable.remove(name)
                    self._warn(error.reason, "media cannot be offered over %s: %s", name, error)
        except BaseException:
            await self.cleanup(list(offered.items()))
            raise
        extra: dict[str, Any] = {}
        for name, refs in offered.items():
            extra |= wire.write_offer(name, modalities, hashes, dict(enumerate(refs)))
        return extra, list(offered.items()), chosen.is_certain

    async def _sender(self, name: str) -> MmKwargsSender[Any]:
        """A sender, opened when it is first needed: NIXL's takes half a second and 256 MB."""
        if name in self._senders:
            return self._senders[name]
        if name not in self._opening:
            self._opening[name] = asyncio.create_task(self._open(name))
        # The thread opens it even if this request is cancelled: others wait for it, or will use it.
        return await asyncio.shield(self._opening[name])

    async def _open(self, name: str) -> MmKwargsSender[Any]:
        try:
            self._senders[name] = await asyncio.to_thread(transfer.open_sender, name)
        except TransferError:
            if name in self._usable:  # not removed by a request that tried before
                self._usable.remove(name)
            raise
        finally:
            del self._opening[name]
        return self._senders[name]

    async def cleanup(self, offered: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """Withdraw what `offer` offered. Upstream's processor calls it by this name."""
        for name, refs in offered:
            if name in self._senders:  # not closed meanwhile
                await self._senders[name].withdraw(refs)

    async def close(self) -> None:
        """Close all senders."""
        if self._opening:
            await asyncio.wait(self._opening.values())
        while self._senders:
            await self._senders.popitem()[1].close()


class SendingProcessor(vllm_processor.VllmProcessor):
    """Upstream's processor with another way to send."""

    outbox: Outbox

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cards = _cards.get()
        self._sender = self.outbox
        # Upstream is to prepare everything but send nothing.
        self.nixl_mm_enabled = False

    async def _prepare_mm_routing(
        self,
        vllm_preproc: Any,
        dynamo_preproc: dict[str, Any],
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> tuple[dict[str, Any] | None, list[Any], bool]:
        info, _, _ = await super()._prepare_mm_routing(
            vllm_preproc, dynamo_preproc, mm_processor_kwargs
        )
        features = vllm_preproc.mm_features
        if not features or dynamo_preproc.get("multi_modal_uuids"):
            return info, [], False
        cards = self._cards.of(_chosen_worker(dynamo_preproc.get("routing")))
        extra, offered, is_certain = await self.outbox.offer(features, cards)
        dynamo_preproc["extra_args"].update(extra)
        return info, offered, is_certain


class SendingFactory(vllm_processor.EngineFactory):
    """Upstream's factory, which makes a `SendingProcessor` for each model."""

    async def chat_engine_factory(self, instance_id: Any, mdc: Any, routed_engine: Any) -> Any:
        _cards.set(Cards(".".join(instance_id.triple())))
        return await super().chat_engine_factory(instance_id, mdc, routed_engine)


def _chosen_worker(routing: Mapping[str, Any] | None) -> object:
    """The worker that a request is bound to, if it is."""
    for name in _WORKER_FIELDS:
        if routing and routing.get(name) is not None:
            return routing[name]
    return None


#: Where ``routing`` names a worker that runs the whole request or its first part.
_WORKER_FIELDS: Final = ("prefill_worker_id", "backend_instance_id", "decode_worker_id")


def install(outbox: Outbox) -> type[SendingFactory]:
    """Make upstream's factory build our processor."""
    SendingProcessor.outbox = outbox
    vllm_processor.VllmProcessor = SendingProcessor
    return SendingFactory

"""The workers' cards side by side."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence

from dynamo_worker_ext.card import Disagreement, WorkerCard, disagreements
from dynamo_worker_ext.doctor.discovery import SeenWorker
from dynamo_worker_ext.doctor.findings import Finding
from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.frontend.plan import plan
from dynamo_worker_ext.hashing import HashMode


def deployment(
    workers: Sequence[SeenWorker], *, host_id: str, usable: Collection[str]
) -> list[Finding]:
    """Everything about the workers that were found.

    Args:
        workers: they may serve several models.
        host_id: `card.host_identity` here, where the frontend is taken to run.
        usable: transports that can be sent over from here.
    """
    if not workers:
        return [
            Finding.problem(
                "workers",
                "discovery has none",
                "start them, or give the --discovery, --endpoint and DYN_* variables of theirs",
            )
        ]
    findings: list[Finding] = []
    for model in sorted({one.model for one in workers}):
        of_model = [one for one in workers if one.model == model]
        findings += _cards(model, of_model)
        findings += _agreement(model, of_model)
    for one in workers:
        if one.card is not None:
            findings.append(_reach(one.worker, one.card, host_id, usable))
    return findings


def _cards(model: str, workers: Sequence[SeenWorker]) -> Iterator[Finding]:
    for one in workers:
        if one.card is None:
            yield Finding.problem(
                "workers", f"{model}: {one.error}", "start it with python -m dynamo_worker_ext.vllm"
            )
            continue
        text = f"{model}: {one.worker} is {one.card.describe()}, blocks of {one.block_size}"
        try:
            mode = HashMode.for_backend(one.card)
        except StartupError as error:
            yield Finding.problem("workers", f"{model}: {error}", "start it anew without that mode")
            continue
        if mode is HashMode.BLOCK_MM_INFOS:
            yield Finding.problem(
                "workers", text, "Dynamo's frontends hash by pad_value since 1.3: --mm-hash-mode"
            )
        elif one.card.mm_routing != "exact":
            yield Finding.note(
                "workers",
                f"{text}: {one.card.mm_hash_support or 'its engine does not take hashes'}",
                "repeated media is routed by the text before it: use an engine version that was "
                "tested",
            )
        elif not one.card.is_ours:
            yield Finding.note(
                "workers", text, "python -m dynamo_worker_ext.vllm says what it takes, and counts"
            )
        else:
            yield Finding.ok("workers", text)
        if not one.system_url:
            yield Finding.note(
                "workers",
                f"{model}: {one.worker} serves no /metrics, and its card names local files",
                "set DYN_SYSTEM_PORT on all workers of a model, or on none: frontends refuse a mix",
            )


def _agreement(model: str, workers: Sequence[SeenWorker]) -> Iterator[Finding]:
    cards = {one.worker: one.card for one in workers if one.card is not None}
    found = disagreements(cards)
    found += _differing("the size of a block", {one.worker: one.block_size for one in workers})
    found += _differing(
        "the model's files",
        {one.worker: _digest(one.checksums) for one in workers},
    )
    found += _differing(
        "whether it is dynamo-worker-ext", {name: card.is_ours for name, card in cards.items()}
    )
    for one in found:
        yield Finding.problem(
            "workers", f"{model}: {one}", "a frontend hashes once for all: start them alike"
        )
    for what in ("engine_version", "package_version"):
        for one in _differing(
            what, {name: getattr(card, what) for name, card in cards.items() if card.is_ours}
        ):
            yield Finding.note("workers", f"{model}: {one}", "expected during an upgrade only")


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]


def _differing(what: str, values: Mapping[str, object]) -> list[Disagreement]:
    said: dict[str, tuple[str, ...]] = {}
    for worker, value in values.items():
        said[str(value)] = (*said.get(str(value), ()), worker)
    return [Disagreement(what, said)] if len(said) > 1 else []


def _reach(worker: str, card: WorkerCard, host_id: str, usable: Collection[str]) -> Finding:
    area = "transports"
    chosen = plan("auto", [card], host_id, usable=usable)
    here = "this host" if card.shares_memory_with(host_id) else "another host"
    if chosen.transports:
        refused = [name for name in card.transports if name not in usable]
        text = f"from here to {worker} ({here}): {chosen.transports[0]}"
        if refused:
            text += f"; it also takes {', '.join(refused)}, which cannot be used here"
        return Finding.ok(area, text)
    if not card.transports:
        advice = "raw media only: encode workers get it first, or it runs with --mm-transfer off"
    elif "nixl" not in card.transports or "nixl" not in usable:
        advice = "it does not share /dev/shm with this host: install nixl on both sides"
    else:
        advice = "it gets raw media"
    takes = ", ".join(card.transports) or "nothing"
    return Finding.note(
        area, f"from here to {worker} ({here}): none reaches it; it takes {takes}", advice
    )

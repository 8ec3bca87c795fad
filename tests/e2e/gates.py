"""Gates that fail when multimodal routing has silently become routing by text prefix.

A deployment whose router cannot tell pictures apart answers every request, only slower and from
the wrong worker. These functions look at what its processes count, before and after some
requests, and raise AssertionError where it is not what it should be. They need no more than two
`Snapshot` of ``/metrics``, so that they can be used with any deployment:

    before = Snapshot.parse(page)
    ...                                  # send pictures that were sent before
    after = Snapshot.parse(page)
    require_full_overlap(before, after, prompt_tokens=[...], block_size=32)

Dynamo 1.6.1: the Rust frontend has a histogram of hit rates; behind the vLLM processor that one
does not move, so that what was expected of the chosen workers is taken instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import ceil

from tests.snapshot import Snapshot

_ROUTER = "dynamo_component_router_"

#: The frontend's ``DYN_LOG`` under which it logs each decision.
ROUTING_LOG = "info,dynamo_llm::kv_router=debug"
_ROUTED = re.compile(r"\[ROUTING\] Best: .* with \d+/(\d+) blocks overlap")

#: What a frontend logs when it can, and when it cannot, tell pictures apart.
_ENABLED = "MM-aware KV routing enabled"
_DEGRADED = (
    "text-prefix overlap still works but the router cannot distinguish requests by image content",
    "MM routing entry skipped",
    "exact MM routing info not built",
    "Rejected incompatible workers",
)


def require_mm_routing_init(metrics: Snapshot, log: str, *, workers: int) -> None:
    """The frontend can route by pictures, and hears of what every worker has cached.

    Args:
        metrics: the frontend's.
        log: all that it has logged.
        workers: how many it should route to.
    """
    assert _ENABLED in log, f"the frontend never said {_ENABLED!r}"
    degraded = [line for line in log.splitlines() if any(mark in line for mark in _DEGRADED)]
    assert not degraded, "the frontend routes by text prefix:\n" + "\n".join(degraded[:5])
    registered = metrics.total(_ROUTER + "worker_registered")
    assert registered == workers, f"{registered:g} of {workers} workers are registered"
    sources = metrics.total(_ROUTER + "kv_zmq_ingress_sources", state="active")
    assert sources == workers, f"{sources:g} of {workers} workers send KV events"
    mismatched = metrics.total(_ROUTER + "kv_event_source_mismatch_workers")
    assert not mismatched, f"{mismatched:g} workers send KV events that do not fit"


def require_full_overlap(
    before: Snapshot, after: Snapshot, *, prompt_tokens: Sequence[int], block_size: int
) -> None:
    """Every repeat overlapped in all of its blocks but the incomplete last.

    Args:
        before: the frontend's, when everything had been sent once.
        after: the frontend's, when everything had been sent again, and nothing else.
        prompt_tokens: length of each repeated prompt, expanded.
        block_size: tokens of a block.
    """
    full = sum(tokens // block_size for tokens in prompt_tokens)
    found = _overlap_tokens(before, after) / block_size
    assert found == full, (
        f"the repeats overlapped in {found:g} of {full} full blocks: the router does not expect "
        "of the workers what they have"
    )


def min_avg_kv_hit_rate(
    before: Snapshot,
    after: Snapshot,
    *,
    prompt_tokens: Sequence[int],
    block_size: int,
    minimum: float = 0.9,
) -> float:
    """The repeats' mean hit rate, of what is possible, is at least `minimum`.

    Args:
        as for `require_full_overlap`.

    Returns:
        The mean, from 0 to 1.
    """
    change = after - before
    counted = change.total(_ROUTER + "kv_hit_rate_count")
    if counted:
        # Of all blocks, the incomplete last one too, which is never cached.
        best = sum(n // block_size / ceil(n / block_size) for n in prompt_tokens)
        rate = change.total(_ROUTER + "kv_hit_rate_sum") / best
    else:
        best = sum(n // block_size * block_size for n in prompt_tokens)
        rate = _overlap_tokens(before, after) / best
    assert rate >= minimum, (
        f"mean KV hit rate of repeats {rate:.2f} of the possible, want {minimum}"
    )
    return rate


def min_routing_total_blocks(log: str, *, minimum: int) -> list[int]:
    """The router looked for at least `minimum` blocks of each request: it knows prompts expanded.

    By text prefix an image is a token or three, and a prompt a block or two. No metric of Dynamo's
    (1.6.1) counts routing tokens, so that its log is read.

    Args:
        log: what the frontend logged during some requests, under `ROUTING_LOG`.
        minimum: blocks, the incomplete last one included.

    Returns:
        How many of each request.
    """
    totals = [int(total) for total in _ROUTED.findall(log)]
    assert totals, f"the frontend's log does not say what it routed; set DYN_LOG={ROUTING_LOG}"
    assert min(totals) >= minimum, (
        f"the router looked for {min(totals)} blocks of a request, want {minimum}: it does not "
        "know what images become"
    )
    return totals


def require_transfer_outcome(
    before: Sequence[Snapshot], after: Sequence[Snapshot], outcomes: Mapping[str, int]
) -> None:
    """The workers got their media in exactly these ways.

    Args:
        before, after: of each worker.
        outcomes: requests by the workers' outcome: ``hit``, ``received``, ``reprocessed``,
            ``lost``, ``raw``, ``text``.
    """
    found: dict[str, float] = {}
    for old, new in zip(before, after, strict=True):
        change = (new - old).by("outcome", "dynamo_worker_ext_requests_total")
        for outcome, count in change.items():
            found[outcome] = found.get(outcome, 0) + count
    assert found == dict(outcomes), f"media came as {found}, want {dict(outcomes)}"


def _overlap_tokens(before: Snapshot, after: Snapshot) -> float:
    return (after - before).total(_ROUTER + "kv_selected_cached_prefix_tokens_total")

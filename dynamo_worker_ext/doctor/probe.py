"""One tiny image through a frontend, and what became of it."""

from __future__ import annotations

import base64
import json
import secrets
import struct
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from dynamo_worker_ext.doctor.findings import Finding

_AREA: Final = "probe"
_OUTCOMES: Final = "dynamo_worker_ext_requests_total"
_SIDE: Final = 56
_LARGEST_ANSWER: Final = 1 << 24

#: What each outcome means for somebody who has just started a deployment.
_MEANING: Final = {
    "hit": "the worker had it already",
    "received": "the frontend processed it, the worker took it over",
    "raw": "the worker processed it itself",
    "reprocessed": "the transfer failed, and the worker processed it from its URL",
    "lost": "the transfer failed, and there was nothing to fall back to",
    "text": "no image reached the worker",
}
_SOUND: Final = ("hit", "received", "raw")


def tiny_png() -> bytes:
    """A picture of one colour, 56 pixels wide and high, that no cache has."""
    row = b"\0" + secrets.token_bytes(3) * _SIDE

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            chunk(b"IDAT", zlib.compress(row * _SIDE)),
            chunk(b"IEND", b""),
        )
    )


def probe(
    frontend: str, *, model: str | None, system_urls: Sequence[str], timeout: float
) -> list[Finding]:
    """Ask about an image, and without one, and compare.

    Args:
        frontend: its URL.
        model: what to ask; the first that it serves if None.
        system_urls: of the workers whose ``/metrics`` are looked at.
        timeout: seconds for each request.
    """
    frontend = frontend.rstrip("/")
    if model is None:
        status, models = _call(f"{frontend}/v1/models", None, timeout)
        names = [one.get("id") for one in models.get("data", [])] if status == 200 else []
        if not names:
            return [
                Finding.problem(
                    _AREA,
                    f"{frontend}/v1/models answered {status}: {_short(models)}",
                    "give the frontend's URL, and wait until it has found a worker",
                )
            ]
        model = str(names[0])
    before = _outcomes(system_urls, timeout)
    status, answer = _ask(frontend, model, timeout, image=True)
    if status != 200:
        return [
            Finding.problem(
                _AREA,
                f"an image sent to {model!r} was answered with {status}: {_short(answer)}",
                "the worker's log says why",
            )
        ]
    after = _outcomes(system_urls, timeout)
    counted = {k: n for k in after if (n := after[k] - before.get(k, 0)) > 0}
    _, text = _ask(frontend, model, timeout, image=False)
    tokens, without = _prompt_tokens(answer), _prompt_tokens(text)
    findings = []
    if tokens is not None and without is not None and tokens <= without:
        findings.append(
            Finding.problem(
                _AREA,
                f"the prompt has {tokens} tokens with an image and {without} without: it got lost",
                "frontend and worker do not agree on how media travels: see DYNAMO_MM_TRANSFER",
            )
        )
    elif tokens is not None and without is not None:
        findings.append(Finding.ok(_AREA, f"an image adds {tokens - without} tokens to a prompt"))
    if not system_urls or not after:
        findings.append(
            Finding.note(
                _AREA,
                "no worker's metrics could be read, so its outcome is not known",
                "set DYN_SYSTEM_PORT on the workers, and give --discovery",
            )
        )
    elif len(counted) != 1 or sum(counted.values()) != 1:
        findings.append(
            Finding.note(
                _AREA,
                f"outcomes counted meanwhile: {counted or 'none'}; which was ours is not known",
                "ask an idle deployment",
            )
        )
    else:
        (outcome,) = counted
        text_ = f"outcome {outcome!r}: {_MEANING.get(outcome, 'unknown to this version')}"
        findings.append(
            Finding.ok(_AREA, text_)
            if outcome in _SOUND
            else Finding.problem(_AREA, text_, "see the worker's log for why the transfer failed")
        )
    return findings


def _ask(frontend: str, model: str, timeout: float, *, image: bool) -> tuple[int, dict[str, Any]]:
    content: list[dict[str, Any]] = [{"type": "text", "text": "What is this?"}]
    if image:
        uri = "data:image/png;base64," + base64.b64encode(tiny_png()).decode()
        content.insert(0, {"type": "image_url", "image_url": {"url": uri}})
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1,
        "temperature": 0,
    }
    return _call(f"{frontend}/v1/chat/completions", body, timeout)


def _prompt_tokens(answer: Mapping[str, Any]) -> int | None:
    usage = answer.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None


def _outcomes(system_urls: Sequence[str], timeout: float) -> dict[str, float]:
    """Requests by outcome over all workers, without those that are 0 everywhere."""
    found: dict[str, float] = {}
    for url in system_urls:
        status, page = _fetch(f"{url}/metrics", None, timeout)
        if status != 200:
            continue
        found.setdefault("text", 0.0)  # so that a page without any counts as read
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == _OUTCOMES:
                    outcome = sample.labels.get("outcome", "")
                    found[outcome] = found.get(outcome, 0.0) + sample.value
    return found


def _call(url: str, body: Any, timeout: float) -> tuple[int, dict[str, Any]]:
    status, text = _fetch(url, body, timeout)
    try:
        decoded = json.loads(text)
    except ValueError:
        decoded = text
    return status, decoded if isinstance(decoded, dict) else {"error": decoded}


def _fetch(url: str, body: Any, timeout: float) -> tuple[int, str]:
    """Status and text; (0, reason) where nobody answers."""
    if not url.startswith(("http://", "https://")):
        return 0, f"{url!r} is no http URL"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked
        url, data, {"Content-Type": "application/json"}
    )
    # Workers and frontend are asked directly, whatever proxy the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            return answer.status, answer.read(_LARGEST_ANSWER).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read(_LARGEST_ANSWER).decode(errors="replace")
    except OSError as error:
        return 0, str(error)


def _short(answer: Mapping[str, Any]) -> str:
    text = json.dumps(answer)
    return text if len(text) <= 300 else text[:300] + "..."

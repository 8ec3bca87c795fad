"""The prompts of a parity check, and their verdicts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from PIL import Image

from dynamo_worker_ext.errors import EngineError, StartupError
from dynamo_worker_ext.hashing import HashMode, RoutingTokens, resolve_routing_tokens
from dynamo_worker_ext.kv_events import KvEventPump
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.parity.check import Blocks, Published, placed, request_side
from dynamo_worker_ext.parity.engine import ParityEngine, Served

#: Seconds for an engine's events to come in.
_EVENTS_S: Final = 20.0

#: Pixels; wide, square and high, so that models that care for shape make different lengths.
_SIZES: Final = ((224, 112), (168, 168), (112, 280), (448, 224))

_WORDS: Final = "Look at this, then say in a few words what you see and where it is. "


@dataclass(frozen=True, slots=True)
class Verdict:
    """One prompt.

    Attributes:
        name: of the prompt.
        tokens: of the expanded prompt.
        blocks: full ones.
        by_processor: where what the engine's processor says first differs from what the worker
            published; empty where nothing does.
        by_files: the same for what the model's files say; None where they are not exact.
    """

    name: str
    tokens: int
    blocks: int
    by_processor: str
    by_files: str | None

    @property
    def is_exact(self) -> bool:
        return not (self.by_processor or self.by_files)


@dataclass(frozen=True, slots=True)
class Report:
    """The whole check.

    Attributes:
        engine, mode, block_size: what was checked.
        files: why the model's files alone do not make for exactness; empty where they do.
        verdicts: one a prompt.
    """

    engine: str
    mode: HashMode
    block_size: int
    files: str
    verdicts: tuple[Verdict, ...]

    @property
    def exact(self) -> int:
        return sum(verdict.is_exact for verdict in self.verdicts)

    @property
    def is_exact(self) -> bool:
        return self.exact == len(self.verdicts)


def picture(number: int) -> Image.Image:
    """A picture that is the same on every run, and another for each number."""
    width, height = _SIZES[number % len(_SIZES)]
    squares = hashlib.shake_256(f"parity {number}".encode()).digest(8 * 8 * 3)
    return Image.frombytes("RGB", (8, 8), squares).resize((width, height), Image.Resampling.NEAREST)


def prompts(engine: ParityEngine, images: int) -> Iterator[tuple[str, str, list[int]]]:
    """Name, text, and the numbers of the pictures in it. What is like an earlier prompt has its
    name, a comma, and what is different."""
    yield "text", _WORDS * 6, []
    for count in range(1, images + 1):
        text = "".join(_WORDS + engine.image_text(i) for i in range(1, count + 1)) + _WORDS
        order = list(range(count))
        label = f"{count} image" + "s" * (count > 1)
        yield label, text, order
        yield f"{label}, again", text, order
        if count > 1:
            yield f"{label}, swapped", text, order[::-1]
    if images > 1:
        adjacent = engine.image_text(1) + engine.image_text(2)
        yield "2 adjacent images", _WORDS + adjacent + _WORDS * 3, [0, 1]


async def check(
    engine: ParityEngine, name: str, model: str, *, images: int, mode: HashMode
) -> Report:
    """Send the prompts and compare.

    Raises:
        EngineError: its events ended, or its cache is too small to tell.
        StartupError: the model's folder is none, or the model takes no images.
    """
    files = await asyncio.to_thread(resolve_routing_tokens, model)
    if images and files.exact and files.image is None:
        raise StartupError(f"{model} takes no images; check it with --images 0")
    failures: list[BaseException] = []
    published = Published(engine.block_size)
    pump = KvEventPump(
        engine.events,
        published,
        engine.normalizer(mode),
        Metrics(),
        on_failure=failures.append,
        replay_endpoint=engine.replay,
        max_blocks=engine.num_blocks,
    )
    pump.start()
    try:
        await asyncio.to_thread(pump.wait_connected, _EVENTS_S)
        verdicts = []
        alike = 0
        patience = _EVENTS_S
        for label, text, order in prompts(engine, images):
            hashes = [hashlib.sha256(f"parity {number}".encode()).hexdigest() for number in order]
            ids = files.encode(text) if files.exact and files.image else engine.encode(text)
            before = published.blocks
            if "," not in label:
                alike = before
            served = await engine.serve(ids, [picture(number) for number in order], hashes)
            wanted = request_side(served, mode, engine.block_size)
            cached = served.cached_tokens // engine.block_size
            compare = _Comparison(published, cached, alike, before)
            if not await _arrived(compare, wanted, patience):
                patience = 1.0  # what this engine does not say now it will not say later
            verdicts.append(
                Verdict(
                    label,
                    len(served.token_ids),
                    len(wanted.hashes),
                    by_processor=compare(wanted),
                    by_files=_by_files(ids, served, files, mode, compare),
                )
            )
            if failures or published.has_removals:
                raise EngineError(
                    f"KV events ended: {failures[0]}"
                    if failures
                    else "the engine took blocks back: its KV cache is too small for this check"
                )
    finally:
        await asyncio.to_thread(pump.stop)
    return Report(
        f"{name} {engine.version}", mode, engine.block_size, files.reason, tuple(verdicts)
    )


async def _arrived(compare: _Comparison, wanted: Blocks, patience: float) -> bool:
    """Wait until the worker has published what is wanted."""
    deadline = asyncio.get_running_loop().time() + patience
    while compare(wanted):
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


@dataclass(frozen=True, slots=True)
class _Comparison:
    """How blocks of one prompt are compared with what the worker published for it."""

    published: Published
    cached: int
    alike: int
    since: int

    def __call__(self, wanted: Blocks) -> str:
        found = self.published.first_difference(
            wanted, cached=self.cached, alike=self.alike, since=self.since
        )
        return "" if found is None else found.describe(len(wanted.hashes))


def _by_files(
    ids: Sequence[int], served: Served, files: RoutingTokens, mode: HashMode, compare: _Comparison
) -> str | None:
    """As `Verdict.by_files`."""
    if not files.exact:
        return None
    counts = [where.length for _, where in served.media]
    try:
        tokens = files.expand(ids, counts) if counts else list(ids)
    except ValueError as error:
        return str(error)
    places = placed(tokens, files.image.id or 0, counts) if files.image else []
    if places is None:
        return f"the expanded prompt does not hold {counts} image tokens one after the other"
    media = [(mm_hash, place) for (mm_hash, _), place in zip(served.media, places, strict=True)]
    return compare(request_side(Served(tokens, media), mode, compare.published.block_size))

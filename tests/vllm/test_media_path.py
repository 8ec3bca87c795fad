"""The media path of the vLLM worker, on real engines: every way in gives the same tokens.

No frontend and no runtime: `VllmWorker.generate` is called in this process with requests as
Dynamo's frontends write them. The processor caches are small enough to be filled by a few
pictures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from dynamo.llm.exceptions import CannotConnect

from tests.context import Context
from tests.counted_worker import Count
from tests.direct import FrontendDouble, Rendered, Reply, Segments, reply_of, request
from tests.pictures import picture
from tests.snapshot import Snapshot
from tests.stack import WORKER_ARGS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

#: Holds about ten pictures of this test.
CACHE_GB = "0.0035"


@dataclass(frozen=True)
class Setup:
    """An engine: the model's family and how its processor cache is kept."""

    family: str
    cache: str

    @property
    def args(self) -> list[str]:
        if self.cache == "none":
            return ["--mm-processor-cache-gb", "0"]
        return ["--mm-processor-cache-gb", CACHE_GB, "--mm-processor-cache-type", self.cache]

    def __str__(self) -> str:
        return f"{self.family}-{self.cache}"


SETUPS = [
    Setup("qwen2_vl", "lru"),
    Setup("qwen2_5_vl", "lru"),
    Setup("qwen3_vl", "lru"),
    Setup("qwen3_5", "lru"),
    Setup("qwen2_5_vl", "shm"),
    Setup("qwen2_5_vl", "none"),
]


@dataclass
class Bench:
    """One worker, a frontend double beside it, and what happened since the last look."""

    setup: Setup
    worker: Any
    front: FrontendDouble
    processed: Count
    segments: Segments
    _before: Snapshot = field(default_factory=Snapshot)
    _processed_before: int = 0

    @property
    def keeps(self) -> bool:
        """Whether the engine keeps processed items at all."""
        return self.setup.cache != "none"

    @property
    def renderer(self) -> Any:
        return self.worker._llm.renderer

    def render(self, count: int = 1) -> Rendered:
        """A prompt with new pictures."""
        return self.front.render([picture() for _ in range(count)]).renamed()

    def offer(self, rendered: Rendered) -> list[dict[str, Any]]:
        return [self.segments.put(item.payload) for item in rendered.items]

    async def send(self, body: Mapping[str, Any]) -> Reply:
        self.mark()
        chunks = [chunk async for chunk in self.worker.generate(body, Context())]
        return reply_of(chunks)

    async def fast(self, rendered: Rendered, **options: Any) -> Reply:
        """Pre-processed over shared memory, without raw media."""
        return await self.send(request(rendered, shm=self.offer(rendered), **options))

    async def raw(self, rendered: Rendered, **options: Any) -> Reply:
        """From data URIs, with the frontend's identities."""
        return await self.send(request(rendered, raw=True, **options))

    def mark(self) -> None:
        self._before = self._snapshot()
        self._processed_before = self.processed.count

    def _snapshot(self) -> Snapshot:
        from prometheus_client import generate_latest

        return Snapshot.parse(generate_latest(self.worker.metrics.registry).decode())

    @property
    def outcomes(self) -> dict[str, float]:
        """Requests since the mark by outcome."""
        change = self._snapshot() - self._before
        return change.by("outcome", "dynamo_worker_ext_requests_total")

    def counted(self, name: str, **labels: str) -> float:
        change = self._snapshot() - self._before
        return change.total(f"dynamo_worker_ext_{name}", **labels)

    @property
    def processed_images(self) -> int:
        return self.processed.count - self._processed_before


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SETUPS, ids=str)
async def bench(
    request: pytest.FixtureRequest,
    environment: None,
    processed: Count,
    tiny_model: Callable[[str], Path],
) -> AsyncIterator[Bench]:
    from dynamo_worker_ext.vllm.args import parse_args
    from dynamo_worker_ext.vllm.handler import VllmWorker

    setup: Setup = request.param
    model = tiny_model(setup.family)
    args = ["--model", str(model), "--served-model-name", "tiny", *WORKER_ARGS, *setup.args]
    worker = VllmWorker(parse_args(args))
    front = FrontendDouble(model)
    with Segments() as segments:
        try:
            await worker.start(0)
            yield Bench(setup, worker, front, processed, segments)
        finally:
            await worker.cleanup()
            front.close()


async def fill_cache(bench: Bench) -> None:
    """Push out whatever the processor cache holds."""
    for _ in range(6):
        await bench.fast(bench.render(3), max_tokens=1)


@pytest.mark.parametrize("count", [1, 3])
async def test_every_path_gives_the_same_tokens(bench: Bench, count: int) -> None:
    rendered = bench.render(count)
    expected = await bench.raw(rendered)
    assert bench.outcomes == {"raw": 1}
    assert bench.processed_images == count
    assert len(expected.tokens) == 8

    # Under another identity nothing of it is cached anywhere.
    moved = rendered.renamed()
    received = await bench.fast(moved)
    assert bench.outcomes == {"received": 1}
    assert bench.processed_images == 0
    assert bench.counted("mm_received_bytes_total") == sum(len(i.payload) for i in moved.items)
    assert received.cached_tokens == 0
    assert received.tokens == expected.tokens

    again = await bench.fast(moved)
    assert bench.outcomes == ({"hit": 1} if bench.keeps else {"received": 1})
    assert bench.processed_images == 0
    assert again.tokens == expected.tokens
    if bench.keeps:
        assert bench.counted("mm_received_bytes_total") == 0


async def test_another_picture_gives_other_tokens(bench: Bench) -> None:
    if bench.setup.family == "qwen3_vl":
        pytest.skip("the tiny Qwen3-VL hardly looks at its picture")
    one, other = await bench.fast(bench.render()), await bench.fast(bench.render())
    assert one.tokens != other.tokens


async def test_fast_then_raw(bench: Bench) -> None:
    rendered = bench.render(2)
    expected = await bench.fast(rendered)
    raw = await bench.raw(rendered)
    assert raw.tokens == expected.tokens
    assert bench.outcomes == ({"hit": 1} if bench.keeps else {"raw": 1})
    assert bench.processed_images == (0 if bench.keeps else 2)
    hit = await bench.fast(rendered)
    assert hit.tokens == expected.tokens
    assert bench.processed_images == 0


async def test_raw_then_fast(bench: Bench) -> None:
    rendered = bench.render(2)
    expected = await bench.raw(rendered)
    fast = await bench.fast(rendered)
    assert fast.tokens == expected.tokens
    assert bench.outcomes == ({"hit": 1} if bench.keeps else {"received": 1})
    assert bench.processed_images == 0
    assert bool(bench.counted("mm_received_bytes_total")) is not bench.keeps
    hit = await bench.raw(rendered)
    assert hit.tokens == expected.tokens
    assert bench.outcomes == ({"hit": 1} if bench.keeps else {"raw": 1})


@pytest.mark.parametrize("first", ["fast", "raw"])
@pytest.mark.parametrize("second", ["fast", "raw"])
async def test_one_of_two_items_is_held(bench: Bench, first: str, second: str) -> None:
    both = bench.render(2)
    expected = await bench.fast(both.renamed())
    held = bench.front.render([picture()]).named(both.hashes[:1])
    held = Rendered(held.token_ids, held.expanded, (both.items[0],))
    await getattr(bench, first)(held)
    reply = await getattr(bench, second)(both)
    assert reply.tokens == expected.tokens
    new = 1 if bench.keeps else 2
    assert bench.counted("mm_items_total", source="hit") == 2 - new
    if second == "fast":
        assert bench.outcomes == {"received": 1}
        assert bench.processed_images == 0
        assert bench.counted("mm_received_bytes_total") == sum(
            len(item.payload) for item in both.items[-new:]
        )
    else:
        assert bench.outcomes == {"raw": 1}
        assert bench.processed_images == new


async def test_the_same_picture_twice_in_one_prompt(bench: Bench) -> None:
    one = picture()
    rendered = bench.front.render([one, one]).renamed()
    expected = await bench.raw(rendered)
    twice = rendered.renamed()
    assert (await bench.fast(twice)).tokens == expected.tokens
    assert (await bench.fast(twice)).tokens == expected.tokens
    assert (await bench.raw(twice)).tokens == expected.tokens


@pytest.mark.parametrize("way", ["fast", "raw"])
async def test_an_item_that_was_evicted_is_fetched_again(bench: Bench, way: str) -> None:
    rendered = bench.render()
    expected = await bench.fast(rendered)
    await fill_cache(bench)
    reply = await getattr(bench, way)(rendered, skip_reading_prefix_cache=True)
    assert reply.tokens == expected.tokens
    assert bench.outcomes == {"received" if way == "fast" else "raw": 1}
    assert bench.processed_images == (way == "raw")


@pytest.mark.parametrize("way", ["fast", "raw"])
async def test_an_item_evicted_between_check_and_submit_is_resent_once(
    bench: Bench, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not bench.keeps:
        pytest.skip("nothing is held, so nothing can be evicted")
    rendered = bench.render(2)
    expected = await bench.fast(rendered)
    media = bench.worker._media
    submit = media.from_transfer if way == "fast" else media.from_raw
    evicted = []

    async def evict_first(*args: Any, **options: Any) -> Any:
        if not evicted:
            evicted.append(rendered.hashes[0])
            await media._on_renderer(lambda: evict(bench, rendered.hashes[0]))
        return await submit(*args, **options)

    monkeypatch.setattr(media, "from_transfer" if way == "fast" else "from_raw", evict_first)
    reply = await getattr(bench, way)(rendered)
    assert evicted == rendered.hashes[:1]
    assert reply.tokens == expected.tokens
    assert bench.counted("mm_resends_total") == 1
    assert sum(bench.outcomes.values()) == 1
    monkeypatch.undo()
    assert (await getattr(bench, way)(rendered)).tokens == expected.tokens
    assert bench.counted("mm_resends_total") == 0


def evict(bench: Bench, mm_hash: str) -> None:
    cache = bench.renderer.mm_processor_cache
    if bench.setup.cache == "lru":
        cache.invalidate(mm_hash)
    else:
        cache.clear_cache()
    assert not cache.is_cached_item(mm_hash)


@pytest.mark.parametrize("way", ["fast", "raw"])
async def test_an_item_that_the_core_lost_is_resent_once(bench: Bench, way: str) -> None:
    if bench.setup.cache != "lru":
        pytest.skip("only the lru cache has a copy in the engine core that can differ")
    rendered = bench.render(2)
    expected = await bench.fast(rendered)
    await bench.worker._llm.engine_core.reset_mm_cache_async()
    reply = await getattr(bench, way)(rendered, skip_reading_prefix_cache=True)
    assert reply.tokens == expected.tokens
    assert bench.counted("mm_resends_total") == 1
    assert bench.outcomes == {"hit": 1}
    assert (await getattr(bench, way)(rendered)).tokens == expected.tokens
    assert bench.counted("mm_resends_total") == 0


async def test_many_at_once_through_a_cache_that_is_too_small(bench: Bench) -> None:
    prompts = [bench.render(1 + i % 3) for i in range(8)]
    expected = [(await bench.fast(p.renamed())).tokens for p in prompts]

    async def ask(index: int, prompt: Rendered) -> Reply:
        body = request(prompt, raw=True) if index % 3 == 2 else None
        body = body or request(prompt, shm=bench.offer(prompt), raw=index % 3 == 1)
        return reply_of([chunk async for chunk in bench.worker.generate(body, Context())])

    for _ in range(2):
        bench.mark()
        replies: Sequence[Reply] = await asyncio.gather(*map(ask, itertools.count(), prompts))
        assert [reply.tokens for reply in replies] == expected
        assert sum(bench.outcomes.values()) == len(prompts)


async def test_items_left_out_by_the_frontend(bench: Bench) -> None:
    """Fewer references than items: good only if everything is held already."""
    rendered = bench.render(2)
    expected = await bench.fast(rendered.renamed())
    one = bench.offer(rendered)[:1]
    reply = await bench.send(request(rendered, shm=one, raw=True))
    assert reply.tokens == expected.tokens
    assert bench.outcomes == {"reprocessed": 1}
    assert bench.counted("mm_transfer_failures_total", reason="invalid_count") == 1
    reply = await bench.send(request(rendered, shm=one, raw=True))
    assert reply.tokens == expected.tokens
    assert bench.outcomes == ({"hit": 1} if bench.keeps else {"reprocessed": 1})


async def test_an_identity_is_of_one_item_only(bench: Bench) -> None:
    """vLLM's core would end: it takes an item that it holds by hash, whatever room it is given."""
    known = bench.render()
    expected = await bench.fast(known)
    larger = bench.front.render([picture(size=448)])
    renamed = larger.named(known.hashes)
    with pytest.raises(CannotConnect, match="invalid_placeholder"):
        await bench.fast(renamed)
    video = request(known, shm=bench.offer(known))
    extra = json.loads(json.dumps(video["extra_args"]).replace('"image"', '"video"'))
    with pytest.raises(CannotConnect, match="invalid_"):
        await bench.send({**video, "extra_args": extra})
    # Raw media goes by what the cache holds, or by content.
    reply = await bench.raw(renamed)
    assert reply.tokens == (expected if bench.keeps else await bench.raw(larger.renamed())).tokens
    assert (await bench.fast(known)).tokens == expected.tokens


async def test_the_picture_behind_a_name_may_change(bench: Bench) -> None:
    """A frontend may give identities by URL."""
    first, second = bench.render(), bench.front.render([picture(size=448)])
    await bench.raw(first)
    await fill_cache(bench)
    reply = await bench.raw(second.named(first.hashes))
    assert bench.outcomes == {"raw": 1}
    assert reply.tokens == (await bench.raw(second.renamed())).tokens


async def test_text_needs_no_processor(bench: Bench) -> None:
    rendered = bench.render()
    body = request(Rendered(rendered.token_ids[:2], [], ()))
    body["token_ids"] = [t for t in rendered.token_ids if t not in bench.worker._media.media_tokens]
    reply = await bench.send(body)
    assert len(reply.tokens) == 8
    assert bench.outcomes == {"text": 1}
    assert bench.processed_images == 0

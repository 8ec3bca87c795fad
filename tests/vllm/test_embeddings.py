"""Embeddings from an encode worker in place of pixels, on two real engines in this process.

No frontend and no runtime: requests go to `VllmEncodeWorker.generate`, and with the handle that it
gives to `VllmWorker.generate`, as Dynamo's router would send them on. In between a test may spoil
whatever travels.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("vllm")
pytest.importorskip("dynamo.llm")

from tests.context import Context
from tests.counted_worker import Count
from tests.direct import FrontendDouble, Rendered, Reply, reply_of, request
from tests.embeddings import data_uri_of, tensors_of
from tests.pictures import picture
from tests.snapshot import Snapshot
from tests.stack import WORKER_ARGS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

#: Families, each with another way in which vLLM keeps processed items.
SETUPS = [("qwen2_5_vl", "lru"), ("qwen3_vl", "shm"), ("qwen2_vl", "none")]


@dataclass
class Bench:
    """An encode worker, a worker that takes its embeddings, and what happened since a mark."""

    family: str
    cache: str
    encoder: Any
    worker: Any
    front: FrontendDouble
    processed: Count
    _before: list[Snapshot] = field(default_factory=list)
    _processed_before: int = 0

    @property
    def keeps(self) -> bool:
        return self.cache != "none"

    @property
    def store(self) -> Any:
        return self.encoder._store

    def render(self, count: int = 1) -> Rendered:
        return self.front.render([picture() for _ in range(count)]).renamed()

    async def encode(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The handle that the encode worker gives."""
        (chunk,) = [chunk async for chunk in self.encoder.generate(body, Context())]
        assert chunk["finish_reason"] == "stop"
        handle: dict[str, Any] = chunk["encoder_result"]
        return copy.deepcopy(handle)

    async def answer(
        self, body: Mapping[str, Any], handle: Mapping[str, Any] | None = None
    ) -> Reply:
        self.mark()
        more = {} if handle is None else {"encoder_result": handle}
        chunks = [c async for c in self.worker.generate({**body, **more}, Context())]
        return reply_of(chunks)

    def mark(self) -> None:
        self._before = self._snapshots()
        self._processed_before = self.processed.count

    def _snapshots(self) -> list[Snapshot]:
        from prometheus_client import generate_latest

        workers = (self.encoder, self.worker)
        return [Snapshot.parse(generate_latest(w.metrics.registry).decode()) for w in workers]

    def _changes(self) -> list[Snapshot]:
        return [new - old for new, old in zip(self._snapshots(), self._before, strict=True)]

    @property
    def encoded(self) -> dict[str, float]:
        """Items of the encode worker since the mark by where it had them from."""
        return self._changes()[0].by("source", "dynamo_worker_ext_mm_items_total")

    @property
    def outcome(self) -> str:
        """What became of the one request since the mark."""
        found = self._changes()[1].by("outcome", "dynamo_worker_ext_requests_total")
        assert list(found.values()) == [1], found
        return next(iter(found))

    def counted(self, name: str, **labels: str) -> float:
        return self._changes()[1].total(f"dynamo_worker_ext_{name}", **labels)

    @property
    def processed_images(self) -> int:
        return self.processed.count - self._processed_before


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SETUPS, ids="-".join)
async def bench(
    request: pytest.FixtureRequest,
    environment: None,
    processed: Count,
    tiny_model: Callable[[str], Path],
) -> AsyncIterator[Bench]:
    from dynamo_worker_ext.vllm.args import parse_args
    from dynamo_worker_ext.vllm.encoder import VllmEncodeWorker
    from dynamo_worker_ext.vllm.handler import VllmWorker

    family, cache = request.param
    model = tiny_model(family)
    args = ["--model", str(model), "--served-model-name", "tiny", *WORKER_ARGS]
    cached = ["--mm-processor-cache-gb", "0"] if cache == "none" else []
    cached += ["--mm-processor-cache-type", cache] if cache == "shm" else []
    encoder = VllmEncodeWorker(
        parse_args([*args, "--disaggregation-mode", "encode", "--embedding-cache-mb", "1"])
    )
    worker = VllmWorker(parse_args([*args, "--route-to-encoder", *cached]))
    front = FrontendDouble(model)
    try:
        await encoder.start(0)
        await worker.start(1)
        yield Bench(family, cache, encoder, worker, front, processed)
    finally:
        await encoder.cleanup()
        await worker.cleanup()
        front.close()


@pytest.mark.parametrize("count", [1, 3])
async def test_embeddings_give_the_tokens_that_pixels_give(bench: Bench, count: int) -> None:
    rendered = bench.render(count)
    expected = await bench.answer(request(rendered.renamed(), raw=True))
    assert bench.outcome == "raw"

    body = request(rendered, raw=True)
    bench.mark()
    handle = await bench.encode(body)
    assert bench.encoded == {"encoded": count}
    assert bench.processed_images == count
    reply = await bench.answer(body, handle)
    assert reply.tokens == expected.tokens
    assert reply.cached_tokens == 0
    assert bench.outcome == "received"
    assert bench.processed_images == 0, "media is processed once in the whole deployment"
    assert bench.counted("mm_received_bytes_total", transport="arena") > 0

    bench.mark()
    again = await bench.encode(body)
    assert bench.encoded == {"cached": count}
    assert bench.processed_images == 0
    assert again == handle, "nothing is offered twice"
    assert (await bench.answer(body, again)).tokens == expected.tokens
    assert bench.outcome == ("hit" if bench.keeps else "received")
    if bench.keeps:
        assert bench.counted("mm_received_bytes_total") == 0


async def test_a_handle_is_good_for_nixl_alone(bench: Bench) -> None:
    body = request(bench.render(2), raw=True)
    expected = await bench.answer(request(bench.render(1), raw=True))
    handle = await bench.encode(body)
    reply = await bench.answer(body, {k: v for k, v in handle.items() if k != "mm_kwargs_arena"})
    assert bench.outcome == "received"
    assert bench.counted("mm_received_bytes_total", transport="nixl") > 0
    assert len(reply.tokens) == len(expected.tokens)


async def test_the_same_hash_as_embeddings_and_then_as_pixels(bench: Bench) -> None:
    body = request(bench.render(2), raw=True)
    first = await bench.answer(body, await bench.encode(body))
    assert bench.outcome == "received"
    raw = await bench.answer(body)
    assert bench.outcome == ("hit" if bench.keeps else "raw")
    assert raw.tokens == first.tokens
    again = await bench.answer(body, await bench.encode(body))
    assert again.tokens == first.tokens


async def test_the_same_hash_as_pixels_and_then_as_embeddings(bench: Bench) -> None:
    body = request(bench.render(2), raw=True)
    raw = await bench.answer(body)
    assert bench.outcome == "raw"
    reply = await bench.answer(body, await bench.encode(body))
    assert bench.outcome == ("hit" if bench.keeps else "received")
    assert reply.tokens == raw.tokens
    assert (await bench.answer(body)).tokens == raw.tokens


async def test_embeddings_and_pixels_in_one_batch(bench: Bench) -> None:
    rendered = [bench.render(), bench.render()]
    bodies = [request(one, raw=True) for one in rendered]
    alone = [await bench.answer(request(one.renamed(), raw=True)) for one in rendered]
    handle = await bench.encode(bodies[0])
    together = await asyncio.gather(bench.answer(bodies[0], handle), bench.answer(bodies[1]))
    assert [one.tokens for one in together] == [one.tokens for one in alone]


async def test_one_picture_twice_in_a_request_is_encoded_once(bench: Bench) -> None:
    image = picture()
    body = request(bench.front.render([image, image]).renamed(), raw=True)
    bench.mark()
    handle = await bench.encode(body)
    assert bench.encoded == {"encoded": 1, "shared": 1}
    assert bench.processed_images == 1
    expected = await bench.answer(request(bench.front.render([image, image]).renamed(), raw=True))
    assert (await bench.answer(body, handle)).tokens == expected.tokens
    assert bench.outcome == "received"


async def test_who_asks_for_the_same_at_once_waits_for_one(bench: Bench) -> None:
    body = request(bench.render(), raw=True)
    bench.mark()
    handles = await asyncio.gather(*(bench.encode(body) for _ in range(5)))
    assert bench.encoded == {"encoded": 1, "shared": 4}
    assert bench.processed_images == 1
    assert all(handle == handles[0] for handle in handles)


async def test_what_arrives_together_is_encoded_together(bench: Bench) -> None:
    calls: list[int] = []
    encode = bench.encoder._encoder.encode

    async def counted(modality: Any, items: Any, options: Any) -> Any:
        calls.append(len(items))
        return await encode(modality, items, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.encoder._encoder, "encode", counted)
        await asyncio.gather(*(bench.encode(request(bench.render(), raw=True)) for _ in range(6)))
    assert sum(calls) == 6
    assert len(calls) <= 3, calls


async def test_salts_are_kept_apart(bench: Bench) -> None:
    body = request(bench.render(), raw=True)
    bench.mark()
    for salt in ("one", "other", "one"):
        await bench.encode({**body, "routing": {"cache_salt": salt}})
    assert bench.encoded == {"encoded": 2, "cached": 1}


async def test_an_image_without_an_identity_gets_that_of_its_content(bench: Bench) -> None:
    body = request(bench.render(), raw=True)
    for name in ("mm_hashes", "mm_hashes_by_modality"):
        del body["extra_args"][name]
    bench.mark()
    handle = await bench.encode(body)
    await bench.encode(body)
    assert bench.encoded == {"encoded": 1, "cached": 1}
    reply = await bench.answer(body, handle)
    assert bench.outcome == "received"
    assert reply.tokens == (await bench.answer(body)).tokens


async def test_processor_options_make_another_item(bench: Bench) -> None:
    body = request(bench.render(), raw=True)
    smaller = {**body, "mm_processor_kwargs": {"max_pixels": 100 * 28 * 28 // 4}}
    plain, other = await bench.encode(body), await bench.encode(smaller)
    assert plain["items"][0]["mm_hash"] != other["items"][0]["mm_hash"]
    expected = await bench.answer(body, plain)
    reply = await bench.answer(smaller, other)
    assert bench.outcome == "received"
    assert len(reply.tokens) == len(expected.tokens)


async def test_too_many_images_and_broken_ones_are_refused(bench: Bench) -> None:
    from dynamo.llm import exceptions

    body = request(bench.render(3), raw=True)
    body["multi_modal_data"]["image_url"] *= 2
    with pytest.raises(exceptions.InvalidArgument, match="at most 3"):
        await bench.encode(body)
    body = request(bench.render(), raw=True)
    body["multi_modal_data"]["image_url"] = [{"Url": "data:image/png;base64,AAAA"}]
    with pytest.raises(exceptions.InvalidArgument):
        await bench.encode(body)


async def test_text_is_passed_on(bench: Bench) -> None:
    body = request(bench.render(), raw=False)
    assert (await bench.encode(body))["items"] == []


async def test_embeddings_that_a_client_sends(bench: Bench) -> None:
    """By safetensors in place of an image, to an encode worker that passes them on."""
    from dynamo.llm import exceptions

    rendered = bench.render()
    body = request(rendered, raw=True)
    expected = await bench.answer(body)
    tensors = await tensors_of(await bench.encode(body))
    sent = {**body, "multi_modal_data": {"image_url": [{"Url": data_uri_of(tensors)}]}}
    handle = await bench.encode(sent)
    assert handle["items"] == []
    for outcome in ("received", "hit" if bench.keeps else "received"):
        reply = await bench.answer(sent, handle)
        assert reply.tokens == expected.tokens
        assert bench.outcome == outcome
        assert bench.processed_images == 0
    narrow = {**tensors, "image_embeds": tensors["image_embeds"][:, :-1].contiguous()}
    sent["multi_modal_data"] = {"image_url": [{"Url": data_uri_of(narrow)}]}
    with pytest.raises(exceptions.InvalidArgument, match="for this model, got"):
        await bench.answer(sent)
    assert (await bench.answer(body)).tokens == expected.tokens


async def expect_reprocessed(
    bench: Bench, rendered: Rendered, handle: Mapping[str, Any], reason: str
) -> None:
    expected = await bench.answer(request(rendered.renamed(), raw=True))
    reply = await bench.answer(request(rendered, raw=True), handle)
    assert bench.outcome == "reprocessed"
    assert bench.counted("mm_transfer_failures_total", reason=reason) >= 1
    assert reply.tokens == expected.tokens


async def test_a_handle_that_has_expired(bench: Bench) -> None:
    rendered = bench.render()
    handle = await bench.encode(request(rendered, raw=True))
    store = bench.store
    for one in [*store._cached.values(), *store._leased]:
        await store._withdraw(one.refs)
    store._cached.clear()
    store._cached_bytes = 0
    await expect_reprocessed(bench, rendered, handle, "segment_stale")


async def test_a_lease_ends_and_leaves_nothing(bench: Bench) -> None:
    store = bench.store
    rendered = bench.render()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_lease_s", 0.2)
        patch.setattr(store, "_max_bytes", 0)
        handle = await bench.encode(request(rendered, raw=True))
        offered = store._senders["arena"].statistics().offered
        await asyncio.sleep(1.0)
        assert store._senders["arena"].statistics().offered == offered - 1
    await expect_reprocessed(bench, rendered, handle, "segment_stale")


@pytest.mark.parametrize(
    ("name", "value"),
    [("shape", [64, 63]), ("dtype", "float32"), ("grid", [1, 16, 12])],
)
async def test_a_handle_that_says_something_else_than_what_comes(
    bench: Bench, name: str, value: object
) -> None:
    rendered = bench.render()
    handle = await bench.encode(request(rendered, raw=True))
    handle["items"][0][name] = value
    await expect_reprocessed(bench, rendered, handle, "invalid_type")


async def test_embeddings_of_another_width_do_not_reach_the_engine(bench: Bench) -> None:
    """A sound handle and payload, of a model that this one is not."""
    rendered = bench.render()
    with pytest.MonkeyPatch.context() as patch:
        make = bench.encoder._encoder.encode

        async def narrower(*args: Any) -> Any:
            return [
                one._replace(embeddings=one.embeddings[:, :-1].contiguous())
                for one in await make(*args)
            ]

        patch.setattr(bench.encoder._encoder, "encode", narrower)
        handle = await bench.encode(request(rendered, raw=True))
    await expect_reprocessed(bench, rendered, handle, "invalid_type")


async def test_a_truncated_embedding_does_not_reach_the_engine(bench: Bench) -> None:
    rendered = bench.render()
    with pytest.MonkeyPatch.context() as patch:
        put = bench.store.put

        async def truncated(key: Any, item: Any, pieces: Any) -> Any:
            whole = b"".join(bytes(piece) for piece in pieces)
            return await put(key, item, [whole[: len(whole) // 2]])

        patch.setattr(bench.store, "put", truncated)
        handle = await bench.encode(request(rendered, raw=True))
    await expect_reprocessed(bench, rendered, handle, "invalid_frame")


async def test_without_raw_media_a_lost_embedding_is_an_error(bench: Bench) -> None:
    from dynamo.llm import exceptions

    body = request(bench.render(), raw=True)
    handle = await bench.encode(body)
    handle["items"][0]["shape"] = [64, 63]
    del body["multi_modal_data"]
    with pytest.raises(exceptions.CannotConnect, match="invalid_type"):
        await bench.answer(body, handle)


async def test_a_tower_that_fails_is_an_error_and_goes_on(bench: Bench) -> None:
    from dynamo.llm import exceptions

    body = request(bench.render(), raw=True)
    with pytest.MonkeyPatch.context() as patch:
        encoder = bench.encoder._encoder
        process = encoder._process

        def truncated(*args: Any) -> Any:
            whole = process(*args)
            return whole._replace(payload=whole.payload[:-100])

        patch.setattr(encoder, "_process", truncated)
        with pytest.raises(exceptions.StreamIncomplete, match="vision tower failed"):
            await bench.encode(body)
    assert not bench.encoder.engine_is_dead()
    assert len((await bench.encode(body))["items"]) == 1


async def test_a_call_of_the_tower_takes_as_much_as_vllm_gives_it(bench: Bench) -> None:
    encoder = bench.encoder._encoder
    batches: list[int] = []
    run = encoder._run_tower

    async def counted(llm: Any, modality: Any, batch: Any) -> Any:
        batches.append(len(batch))
        return await run(llm, modality, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "_most_tokens", 130)
        patch.setattr(encoder, "_run_tower", counted)
        found = await encoder.encode("image", [picture() for _ in range(5)], None)
    each = found[0].embeddings.shape[0]
    most = max(1, 130 // each)
    assert sum(batches) == len(found) == 5
    assert max(batches) == most

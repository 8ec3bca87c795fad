"""SGLang's vision towers for the encode worker: its `MMEncoder`, which loads nothing else.

The language model is not loaded. `MMEncoder` is made for servers of its own; of it only two steps
are used here, the processor and the tower. Both run on a thread with an event loop of its own,
because the second blocks it. Lives in the worker process.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeVar

import sglang
import torch
from sglang.srt.disaggregation.encoder.preprocessor import EncoderPreprocessResult
from sglang.srt.disaggregation.encoder.server import MMEncoder, MMError
from sglang.srt.managers.schedule_batch import Modality as EngineModality
from sglang.srt.runtime_context import publish

from dynamo_worker_ext.errors import (
    EngineError,
    RequestError,
    StartupError,
    UnsupportedOptionError,
)
from dynamo_worker_ext.sglang.args import Config
from dynamo_worker_ext.sglang.features import FAMILIES, FeatureReader, Features, FieldNames
from dynamo_worker_ext.sglang.videos import VideoProcessor
from dynamo_worker_ext.transfer.kwargs import KwargsItem
from dynamo_worker_ext.wire import MediaItem, Modality
from dynamo_worker_ext.wire.types import MAX_ITEMS
from dynamo_worker_ext.worker.encode import EncodeWorker
from dynamo_worker_ext.worker.encoder import (
    Encoded,
    EncoderInfo,
    Expansion,
    ProcessedMedia,
    Video,
    runs_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_T = TypeVar("_T")

#: Seconds that the thread gets to end.
_END_S: Final = 10.0


class SglangEncoder:
    """The vision tower of one model; an `Encoder`.

    Args:
        config: the parsed command line.
    """

    decodes_videos = True

    def __init__(self, config: Config) -> None:
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="sglang-encoder", daemon=True)
        self._encoder: Any = None
        self._tokens: dict[Modality, int] = {}
        self._videos: VideoProcessor | None = None
        self._reader: FeatureReader | None = None

    async def start(self) -> EncoderInfo:
        server_args = self._config.server_args(encoder_only=True)
        self._thread.start()
        return await self._on_thread(self._load(server_args))

    def check(self, item: MediaItem, payload: KwargsItem) -> None:
        self._known_reader().read(item, payload)

    async def encode(
        self,
        modality: Modality,
        items: Sequence[Image | Video | ProcessedMedia],
        processor_kwargs: Mapping[str, Any] | None,
    ) -> list[Encoded]:
        if processor_kwargs:
            raise UnsupportedOptionError(
                "mm_processor_kwargs cannot be honoured by SGLang; leave them out"
            )
        if self._encoder is None:
            raise EngineError("the encoder is not running")
        return await self._on_thread(self._encode(modality, items))

    def is_dead(self) -> bool:
        return self._encoder is not None and not self._thread.is_alive()

    async def close(self) -> None:
        self._encoder = None
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join, _END_S)
        if not self._loop.is_running():
            self._loop.close()

    # On the thread.

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _on_thread(self, work: Coroutine[Any, Any, _T]) -> _T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _load(self, server_args: Any) -> EncoderInfo:
        publish(server_args, role="encoder")
        try:
            # Of one process: the group has nobody else to be found by.
            encoder = MMEncoder(server_args=server_args, dist_init_method="tcp://127.0.0.1:0")
        except (ValueError, RuntimeError, OSError, AssertionError) as error:
            raise StartupError(f"SGLang's encoder did not start: {error}") from error
        config = encoder.model_config
        family = config.hf_config.model_type
        if family not in FAMILIES:
            raise StartupError(
                f"this encode worker does not know how prompts of model type {family!r} name their "
                f"images; it knows {', '.join(FAMILIES)}"
            )
        own, names = encoder.preprocessor, FAMILIES[family]
        self._tokens = {m: int(getattr(config.hf_config, f"{m}_token_id")) for m in names}
        self._reader = FeatureReader.of(config.hf_config, own.image_processor, config.dtype)
        given = server_args.limit_mm_data_per_request or {}
        limits = {m: limit for m in names if (limit := given.get(m, MAX_ITEMS))}
        if "video" in limits:
            self._videos = VideoProcessor(config, server_args, names["video"])
        encoder.preprocessor = _Preprocessor(own, names)
        self._encoder = encoder
        return EncoderInfo(
            engine_version=sglang.__version__,
            limits=limits,
            context_length=config.context_len,
            block_size=server_args.page_size or 1,
            probe_tokens=(self._tokens["image"],),
            takes_processed=self._reader is not None,
        )

    def _known_reader(self) -> FeatureReader:
        if self._reader is None:
            raise EngineError("the encoder is not running")
        return self._reader

    async def _encode(
        self, modality: Modality, items: Sequence[Image | Video | ProcessedMedia]
    ) -> list[Encoded]:
        found: list[Encoded] = []
        for kind, group in groupby(items, type):
            taken: list[Any] = list(group)
            if kind is ProcessedMedia:
                taken = [self._read(one) for one in taken]
            elif modality == "video":
                taken = [await self._process(video) for video in taken]
            found += await self._run(modality, taken)
        return found

    def _read(self, one: ProcessedMedia) -> Features:
        reader = self._known_reader()
        tokens = [token for token, count in one.runs for _ in range(count)]
        return reader.normalised(reader.read(one.item, one.payload), tokens)

    async def _process(self, video: Video) -> Features:
        if self._videos is None:
            raise EngineError("the encoder takes no videos")
        try:
            return await self._videos.process(video)
        except (ValueError, TypeError) as error:
            raise RequestError(f"the model's processor refuses the video: {error}") from error

    async def _run(self, modality: Modality, items: Sequence[Image | Features]) -> list[Encoded]:
        """Encode pictures, or what was processed; all of one kind."""
        encoder = self._encoder
        request = {
            "req_id": uuid.uuid4().hex,
            "num_parts": 1,
            "part_idx": 0,
            "mm_items": list(items),
            "hashes": None,
        }
        try:
            context = await encoder._prepare_encode_context(
                [request], EngineModality[modality.upper()], use_global_cache=False
            )
            embeddings = await encoder._compute_embedding(context, keep_on_gpu=False)
        except MMError as error:
            if 400 <= int(error.code) < 500:
                raise RequestError(str(error)) from error
            raise EngineError(f"SGLang's encoder failed: {error}") from error
        counts = [int(count) for count in context.preprocess_result.token_counts]
        grids = torch.as_tensor(context.preprocess_result.grid_thw, dtype=torch.int64).cpu()
        if embeddings is None or len(counts) != len(items) or embeddings.shape[0] != sum(counts):
            raise EngineError(
                f"SGLang's encoder made {'nothing' if embeddings is None else embeddings.shape[0]} "
                f"of {len(items)} {modality}(s) that need {counts} tokens"
            )
        token = self._tokens[modality]
        found = []
        for item, part, grid in zip(items, embeddings.split(counts), grids, strict=True):
            tokens, seconds = (token,) * len(part), None
            if isinstance(item, Features):
                tokens, seconds = item.tokens, next(iter(item.scalars.values()), None)
            found.append(
                Encoded(
                    modality,
                    # A copy: the parts would keep the whole batch in memory.
                    part.clone(memory_format=torch.contiguous_format),
                    grid,
                    Expansion((token,), runs_of(tokens)),
                    seconds,
                )
            )
        return found


class _Preprocessor:
    """`MMEncoder`'s own, which is asked for nothing where media comes processed.

    Args:
        own: the one that it made.
        names: what the model's family calls its tensors, by modality.
    """

    def __init__(self, own: Any, names: Mapping[Modality, FieldNames]) -> None:
        self._own = own
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    async def process_batch_mm_items(
        self, requests: list[dict[str, Any]], modality: EngineModality
    ) -> tuple[EncoderPreprocessResult, list[int]]:
        items = [item for request in requests for item in request["mm_items"]]
        if not isinstance(items[0], Features):
            result: tuple[EncoderPreprocessResult, list[int]]
            result = await self._own.process_batch_mm_items(requests, modality)
            return result
        names = self._names[items[0].modality]
        grids = torch.cat([item.grid for item in items])
        merge = self._own.image_processor.merge_size
        tensors = {names.pixels: torch.cat([item.pixels for item in items]), names.grid: grids}
        counts = [int(grid.prod()) // merge**2 for grid in grids]
        return EncoderPreprocessResult(tensors, grids, counts), [len(items)]


class SglangEncodeWorker(EncodeWorker):
    """Serves the vision tower of one SGLang model.

    Args:
        config: the parsed command line.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config, SglangEncoder(config), "sglang")

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[SglangEncodeWorker, Any]:
        from dynamo_worker_ext.sglang.args import parse_args

        config = parse_args(argv)
        return cls(config), config.worker

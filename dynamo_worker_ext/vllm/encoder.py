"""vLLM's vision towers for the encode worker: an engine that runs nothing but the encoder.

The engine is started with ``mm_encoder_only``: the language model is neither loaded nor given a KV
cache. Images are processed here by vLLM's own processor for the model, and the tower is called in
the engine's workers (`dynamo_worker_ext.vllm.tower`), past its scheduler. Lives in the worker
process.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
from vllm.exceptions import VLLMClientError
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.serial_utils import MsgpackEncoder

from dynamo_worker_ext.errors import EngineError, InvalidTransferError, StartupError
from dynamo_worker_ext.transfer import codec
from dynamo_worker_ext.transfer.kwargs import KwargsItem
from dynamo_worker_ext.vllm.args import Config
from dynamo_worker_ext.vllm.ec_role import silent_producer
from dynamo_worker_ext.vllm.embeds import SECONDS, EmbeddingReference
from dynamo_worker_ext.vllm.errors import ENGINE_ERRORS, as_ours
from dynamo_worker_ext.vllm.reference import ItemReference, example_media, learn_references
from dynamo_worker_ext.vllm.tower import BATCH, EMBEDDINGS, VisionTower
from dynamo_worker_ext.wire import MediaItem, Modality
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
    import torch
    from PIL.Image import Image

log = logging.getLogger(__name__)

_NAME: Final = f"{VisionTower.__module__}.{VisionTower.__qualname__}"


#: What an encoder takes, where the model does.
_MODALITIES: Final[tuple[Modality, ...]] = ("image", "video")


class _Processed(NamedTuple):
    """One item after the model's processor.

    Attributes:
        payload: its tensors, as `codec` has them.
        grid: [3]; None for a model without grids.
        seconds: see `Encoded.seconds_per_grid`.
        expansion: what it becomes in the prompt.
        tokens: embeddings that it needs.
    """

    payload: bytes
    grid: torch.Tensor | None
    seconds: float | None
    expansion: Expansion
    tokens: int


class VllmEncoder:
    """The vision tower of one model; an `Encoder`.

    Args:
        config: the parsed command line; its engine arguments are changed.
    """

    decodes_videos = False

    def __init__(self, config: Config) -> None:
        self._engine_args = config.engine_args
        self._llm: AsyncLLM | None = None
        self._processor: Any = None
        self._prompts: dict[Modality, list[int]] = {}
        self._most_tokens = 0
        self._references: Mapping[Modality, ItemReference] = {}
        self._targets: dict[Modality, tuple[int, ...]] = {}

    async def start(self) -> EncoderInfo:
        args = self._engine_args
        if args.worker_extension_cls and args.worker_extension_cls != _NAME:
            raise StartupError(
                f"an encode worker has a --worker-extension-cls of its own; leave out "
                f"{args.worker_extension_cls}"
            )
        args.worker_extension_cls = _NAME
        args.mm_encoder_only = True
        args.enable_prefix_caching = False
        # The embedding cache is what remembers.
        args.mm_processor_cache_gb = 0
        args.ec_transfer_config = args.ec_transfer_config or silent_producer()
        try:
            vllm_config = args.create_engine_config()
        except (ValueError, OSError) as error:
            raise StartupError(f"vLLM refuses its arguments: {error}") from error
        if vllm_config.model_config.multimodal_config is None:
            raise StartupError("an encode worker needs a multimodal model")
        # What vLLM gives its encoder at a time, and has measured its memory with.
        self._most_tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens
        self._llm = llm = AsyncLLM.from_vllm_config(vllm_config)
        self._processor = processor = llm.renderer.get_mm_processor()
        allowed = processor.info.allowed_mm_limits
        self._references = await asyncio.get_running_loop().run_in_executor(
            llm.renderer._mm_executor, self._learn, [m for m in _MODALITIES if allowed.get(m)]
        )
        return EncoderInfo(
            engine_version=importlib.metadata.version("vllm"),
            limits={modality: allowed[modality] for modality in self._references},
            context_length=vllm_config.model_config.max_model_len,
            block_size=vllm_config.cache_config.block_size,
            probe_tokens=self._prompts.get("image", ()),
            takes_processed=True,
        )

    def _learn(self, modalities: Sequence[Modality]) -> Mapping[Modality, ItemReference]:
        """Of what the model also takes embeddings of: what processed items look like, what prompts
        name them by, and what they replace. On the renderer's thread."""
        processor = self._processor
        tokenizer = processor.info.get_tokenizer()
        references = {
            modality: reference
            for modality, reference in learn_references(processor, modalities).items()
            if EmbeddingReference.learn(processor, modality, reference) is not None
        }
        for modality in list(references):
            text = processor.dummy_inputs.get_dummy_text({modality: 1})
            self._prompts[modality] = list(tokenizer.encode(text, add_special_tokens=False))
            try:
                small = self._process(modality, example_media(processor, modality))
            except EngineError as error:
                log.warning("%ss are not encoded but passed on: %s", modality, error)
                del references[modality]
            else:
                self._targets[modality] = small.expansion.target
        return references

    def check(self, item: MediaItem, payload: KwargsItem) -> None:
        if (reference := self._references.get(item.modality)) is None:
            raise InvalidTransferError(
                f"processed {item.modality}s of this model are not known", reason="invalid_type"
            )
        reference.check(payload, item)

    async def encode(
        self,
        modality: Modality,
        items: Sequence[Image | Video | ProcessedMedia],
        processor_kwargs: Mapping[str, Any] | None,
    ) -> list[Encoded]:
        llm = self._llm
        if llm is None:
            raise EngineError("the encoder is not running")
        loop = asyncio.get_running_loop()
        try:
            processed = await loop.run_in_executor(
                llm.renderer._mm_executor,
                lambda: [
                    self._take(item)
                    if isinstance(item, ProcessedMedia)
                    else self._process(modality, item, processor_kwargs)
                    for item in items
                ],
            )
        except (VLLMClientError, ValueError) as error:
            raise as_ours(error) from error
        found: list[Encoded] = []
        for batch in _batches(processed, self._most_tokens):
            embeddings = await self._run_tower(llm, modality, batch)
            found += [
                Encoded(modality, embeddings[i], one.grid, one.expansion, one.seconds)
                for i, one in enumerate(batch)
            ]
        return found

    async def _run_tower(
        self, llm: AsyncLLM, modality: Modality, batch: Sequence[_Processed]
    ) -> list[torch.Tensor]:
        payload = msgspec.msgpack.encode([one.payload for one in batch])
        try:
            results = await llm.collective_rpc("dwe_encode", args=(modality, payload))
        except ENGINE_ERRORS as error:
            raise as_ours(error) from error
        except Exception as error:  # vLLM (0.31.0) has no other type for a call that failed
            raise EngineError(f"the vision tower failed: {error}") from error
        return _read(results[0], batch)

    def is_dead(self) -> bool:
        return self._llm is not None and self._llm.errored

    async def close(self) -> None:
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown)

    def _take(self, one: ProcessedMedia) -> _Processed:
        """An item that was processed elsewhere, and checked."""
        modality = one.item.modality
        return _Processed(
            payload=b"".join(codec.encode(one.payload)),
            **_facts(modality, {name: field.data for name, field in one.payload.fields.items()}),
            expansion=Expansion(self._targets[modality], one.runs),
            tokens=one.item.placeholder.embeds,
        )

    def _process(
        self,
        modality: Modality,
        item: Image | Video,
        options: Mapping[str, Any] | None = None,
    ) -> _Processed:
        """Have the model's processor make one item. On the renderer's thread."""
        prompt = self._prompts[modality]
        output = self._processor.apply(
            ProcessorInputs(
                prompt=list(prompt),
                mm_data_items=self._processor.info.parse_mm_data({modality: [item]}),
                hf_processor_mm_kwargs=dict(options or {}),
            ),
            TimingContext(enabled=False),
        )
        (made,) = output["mm_kwargs"][modality]
        (where,) = output["mm_placeholders"][modality]
        return _Processed(
            payload=b"".join(codec.frame(MsgpackEncoder().encode(made))),
            **_facts(modality, {name: field.data for name, field in made.items()}),
            expansion=_expansion(prompt, output["prompt_token_ids"], where),
            tokens=where.get_num_embeds(),
        )


def _facts(modality: Modality, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of an item besides its embeddings, of its fields' data."""
    grid, seconds = fields.get(f"{modality}_grid_thw"), fields.get(SECONDS)
    return {
        "grid": None if grid is None else cast("torch.Tensor", grid).flatten().long(),
        "seconds": None if seconds is None else float(seconds),
    }


def _batches(processed: Sequence[_Processed], most_tokens: int) -> Iterator[list[_Processed]]:
    """The same in order, in parts of so many tokens at most; an item is never divided."""
    batch: list[_Processed] = []
    for one in processed:
        if batch and sum(other.tokens for other in batch) + one.tokens > most_tokens:
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def _expansion(before: Sequence[int], after: Sequence[int], where: Any) -> Expansion:
    """What the one item of a prompt replaced, and by what."""
    first, behind = where.offset, where.offset + where.length
    width = len(before) - (len(after) - where.length)
    if (
        width < 1
        or list(before[:first]) != list(after[:first])
        or list(before[first + width :]) != list(after[behind:])
    ):
        raise EngineError("this model's processor does not replace a placeholder by the image")
    return Expansion(tuple(before[first : first + width]), runs_of(after[first:behind]))


def _read(result: bytes, processed: Sequence[_Processed]) -> list[torch.Tensor]:
    """The embeddings of a batch, which are as many as its placeholders have room for."""
    try:
        found = [codec.decode(memoryview(bytearray(one))) for one in BATCH.decode(result)]
        embeddings = [item.fields[EMBEDDINGS].data for item in found]
    except (msgspec.MsgspecError, InvalidTransferError, KeyError) as error:
        raise EngineError(f"the vision tower's answer is malformed: {error}") from error
    shapes = [tuple(getattr(one, "shape", ())) for one in embeddings]
    wanted = [one.tokens for one in processed]
    if [shape[0] for shape in shapes if len(shape) == 2] != wanted:
        raise EngineError(f"the vision tower gave {shapes} for items of {wanted} tokens")
    return cast("list[torch.Tensor]", embeddings)


class VllmEncodeWorker(EncodeWorker):
    """Serves the vision tower of one vLLM engine.

    Args:
        config: the parsed command line.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config, VllmEncoder(config), "vllm")

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[VllmEncodeWorker, Any]:
        from dynamo_worker_ext.vllm.args import parse_args

        config = parse_args(argv)
        return cls(config), config.worker

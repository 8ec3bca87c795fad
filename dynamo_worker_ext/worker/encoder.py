"""What an engine gives to an encode worker: its vision tower, behind one small contract.

`EncodeWorker` owns everything else: requests, media, identities, batching, the embedding cache,
transports and leases. Lives in the worker process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from dynamo_worker_ext.transfer.kwargs import KwargsItem
from dynamo_worker_ext.wire import MediaItem, Modality

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image


class Expansion(NamedTuple):
    """What an item becomes in the prompt, as the model's own processor has it.

    Attributes:
        target: token ids that stand for one item before expansion; usually one.
        runs: what replaces them, as (token id, count): ``((151655, 256),)``.
    """

    target: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]


def runs_of(tokens: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Tokens as `Expansion.runs`."""
    return tuple((token, len(list(run))) for token, run in groupby(tokens))


#: Frames, [frames, height, width, 3], uint8, and what the loader says of them; or the file of a
#: video, for an encoder that decodes it.
Video: TypeAlias = "tuple[np.ndarray[Any, Any], Mapping[str, Any]] | bytes"


class ProcessedMedia(NamedTuple):
    """An item that a frontend has put through the model's processor.

    Attributes:
        item: what it is, and where it stands in the expanded prompt.
        payload: its tensors, which the encoder has checked.
        runs: its placeholder's tokens, as `Expansion.runs`.
    """

    item: MediaItem
    payload: KwargsItem
    runs: tuple[tuple[int, int], ...]


class Encoded(NamedTuple):
    """One encoded item.

    Attributes:
        modality: its kind.
        embeddings: [tokens, width], on the CPU, contiguous, in the model's own dtype. The width is
            what the language model takes of an item, deep-stack layers included.
        grid: [3], int64: time, height, width in patches; None for a model that has no grids.
        expansion: what it becomes in the prompt.
        seconds_per_grid: of a video, between two steps of its grid; None for a model whose
            positions do not need it.
    """

    modality: Modality
    embeddings: torch.Tensor
    grid: torch.Tensor | None
    expansion: Expansion
    seconds_per_grid: float | None = None


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """What is known of an encoder once it runs.

    Attributes:
        engine_version: for the card.
        limits: most items of each modality in one request; only those that it can encode.
        context_length: of the model, in tokens.
        block_size: tokens of a KV block, as the workers that take its embeddings have it.
        probe_tokens: a prompt that holds one image, before expansion; for the health check.
        takes_processed: `Encoder.encode` takes `ProcessedMedia` too.
        engine_config: more for the SDK's `EngineConfig.runtime_data`.
    """

    engine_version: str
    limits: Mapping[Modality, int]
    context_length: int
    block_size: int
    probe_tokens: Sequence[int] = ()
    takes_processed: bool = False
    engine_config: Mapping[str, Any] = field(default_factory=dict)


class Encoder(Protocol):
    """The vision side of one engine.

    `encode` is called again only when the call before is over; what arrives meanwhile comes
    together in the next.

    Attributes:
        decodes_videos: it takes a video's file.
    """

    decodes_videos: bool

    async def start(self) -> EncoderInfo:
        """Load the vision tower.

        Raises:
            StartupError: it cannot serve as it was started.
        """

    def check(self, item: MediaItem, payload: KwargsItem) -> None:
        """Refuse a processed item that this model's tower does not take.

        Raises:
            InvalidTransferError: it is not what this model's processor makes for `item`.
        """

    async def encode(
        self,
        modality: Modality,
        items: Sequence[Image | Video | ProcessedMedia],
        processor_kwargs: Mapping[str, Any] | None,
    ) -> list[Encoded]:
        """Encode a batch; the results are in its order.

        Must not block the event loop for longer than some milliseconds.

        Args:
            modality: of all of them.
            items: RGB pictures or videos, and such that were processed and checked.
            processor_kwargs: options for the model's processor, the same for all of them.

        Raises:
            RequestError: the model's processor refuses an item; the items of a batch that was
                refused are then encoded one by one.
            EngineError: the engine failed.
        """

    def is_dead(self) -> bool:
        """Whether it has failed for good. Cheap; never raises."""

    async def close(self) -> None:
        """Stop, also after a `start` that failed half-way. A second call is a no-op."""

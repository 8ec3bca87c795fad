"""The media side of a request once it is checked. What is in here can be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from dynamo_worker_ext.errors import InvalidTransferError

Modality = Literal["image", "video", "audio"]
MODALITIES: Final[tuple[Modality, ...]] = ("image", "video", "audio")

#: Transports in the order in which a receiver prefers them.
TRANSPORTS: Final = ("arena", "shm", "nixl")

#: More items than any model takes; keeps a hostile count from costing time.
MAX_ITEMS: Final = 4096

#: A plain name: no folders, and a leading dot would be a hidden file.
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,249}\Z")]
Size = Annotated[int, msgspec.Meta(ge=1)]


class Placeholder(msgspec.Struct, frozen=True):
    """Where one item stands in the expanded prompt.

    Attributes:
        offset: index of the first token.
        length: number of tokens, at least 1.
        is_embed: of each of these tokens, whether an embedding replaces it; None for all.
    """

    offset: int
    length: int
    is_embed: tuple[bool, ...] | None = None

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def embeds(self) -> int:
        """How many of its tokens embeddings replace."""
        return self.length if self.is_embed is None else sum(self.is_embed)


class Embeddings(msgspec.Struct, frozen=True):
    """What an encode worker made of one item, in place of what a processor makes.

    Attributes:
        shape: [tokens, width].
        dtype: of the embeddings, as torch names it.
        grid: [time, height, width] in patches; None for a model that has no grids.
        seconds_per_grid: of a video, between two steps of its grid; None where nobody needs it.
    """

    shape: tuple[int, int]
    dtype: str
    grid: tuple[int, int, int] | None
    seconds_per_grid: float | None = None


class MediaItem(msgspec.Struct, frozen=True):
    """One media item of a transfer: what it is and where it stands.

    Attributes:
        modality: its kind.
        mm_hash: its identity.
        placeholder: where it stands in the expanded prompt.
        embeddings: what its payload holds if an encode worker made it; else None.
    """

    modality: Modality
    mm_hash: str
    placeholder: Placeholder
    embeddings: Embeddings | None = None


@dataclass(frozen=True, slots=True)
class ArenaRef:
    """One item in the arena of a sender on the same host.

    Attributes:
        socket: plain name of the sender's socket, where the memory is handed over.
        host_id: the sender's `card.host_identity`.
        part: which of the arena's memory objects.
        slot: entry of that object's slot table.
        offset: of the payload in the object, in bytes.
        size: of the payload, in bytes.
        generation: of the slot; another number means other content.
    """

    socket: str
    host_id: str
    part: int
    slot: int
    offset: int
    size: int
    generation: int


@dataclass(frozen=True, slots=True)
class ShmRef:
    """One item in a shared-memory segment: its plain name and payload size in bytes."""

    name: Name
    size: Size


@dataclass(frozen=True, slots=True)
class NixlRef:
    """One item that a NIXL agent offers: payload size in bytes and the agent's descriptor."""

    size: int
    descriptor: Mapping[str, Any]


ItemRef = ArenaRef | ShmRef | NixlRef


class Transfer(msgspec.Struct, frozen=True):
    """Validated transfer metadata of one request.

    Attributes:
        expanded_token_ids: the prompt with every placeholder in full.
        items: the items in the order of the sender, one modality after the other.
        offers: for each transport the references, by index in `items`. One may offer fewer than
            all. Dynamo's senders leave out an item that the frontend's own cache held and do not
            say which: nothing is then known to be offered, and the mapping is empty.
    """

    expanded_token_ids: list[int]
    items: tuple[MediaItem, ...]
    offers: Mapping[str, Mapping[int, ItemRef]]

    def is_complete(self, transport: str) -> bool:
        """Whether `transport` offers every item."""
        return len(self.offers[transport]) == len(self.items)


class MediaRequest(msgspec.Struct, frozen=True):
    """The media side of one request.

    Attributes:
        token_ids: the prompt as the frontend tokenised it, placeholders not expanded.
        transfer: transfer metadata, if any came and it was well formed.
        transfer_error: why it was not.
        raw: raw media by modality, in prompt order, as Dynamo's loaders take them.
        mm_hashes: identities that the frontend gave to the raw media, by modality.
        user_uuids: cache identities chosen by the client, by modality.
        mm_processor_kwargs: options for the model's processor; they change what an item is.
        media_io_kwargs: options for decoding, by modality.
    """

    token_ids: list[int]
    transfer: Transfer | None = None
    transfer_error: InvalidTransferError | None = None
    raw: Mapping[Modality, Sequence[Mapping[str, Any]]] = {}
    mm_hashes: Mapping[Modality, tuple[str, ...]] = {}
    user_uuids: Mapping[Modality, tuple[str | None, ...]] = {}
    mm_processor_kwargs: Mapping[str, Any] | None = None
    media_io_kwargs: Mapping[str, Any] | None = None

    def count(self, modality: Modality) -> int:
        """Items of one modality that this request names, by the larger of its two ways in."""
        items = self.transfer.items if self.transfer is not None else ()
        moved = [item.modality for item in items].count(modality)
        return max(moved, len(self.raw.get(modality, ())))

    def identities(self, modality: Modality) -> tuple[str | None, ...] | None:
        """Identities of one modality's raw media, aligned with it: the client's own before the
        frontend's. None where there are none or their count differs."""
        values = self.user_uuids.get(modality) or self.mm_hashes.get(modality)
        return values if values and len(values) == len(self.raw.get(modality, ())) else None

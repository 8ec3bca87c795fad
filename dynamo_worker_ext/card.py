"""What a worker says about itself on its registration card.

Dynamo carries `LLMEngine`'s ``EngineConfig.runtime_data`` to every frontend unchanged:

    {"backend_framework": "vllm", "dynamo_worker_ext": {"mm_hash_mode": "pad_value", ...}}

A frontend chooses the form of hashes (`HashMode.for_backend`) and the transport from it. A worker
without our part is a plain Dynamo worker and stays usable; one that does not name its framework
is not, because a wrong guess would route every image to the wrong place without an error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.hashing import HashMode

BackendFramework = Literal["vllm", "sglang"]
MmRouting = Literal["exact", "text_prefix"]

#: Our part of the card.
EXT_KEY: Final = "dynamo_worker_ext"

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SHM: Final = Path("/dev/shm")  # noqa: S108 - the memory that is shared, not a temporary file

_Names = Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=256)]


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """One worker, as a frontend sees it.

    Attributes:
        backend_framework: whose engine it is.
        package_version: of dynamo-worker-ext; None for a plain Dynamo worker.
        engine_version: of the engine.
        mm_hash_mode: how its KV events express media; what Dynamo 1.3 and later do, where the
            card is silent.
        mm_hash_hex_chars: characters of an ``mm_hash`` that the engine takes, 16 or 64.
        transports: ways in which it is to be sent pre-processed media, best first.
        max_item_bytes: the largest payload of one item that it receives; None if it does not say.
        host_id: see `host_identity`; empty where shared memory cannot reach it.
        modalities: kinds of media that its model takes.
        patches: engine patches that are in effect.
        mm_routing: ``exact`` where its KV events identify media as the router does, ``text_prefix``
            where a router can count on nothing behind the first media item.
        mm_hash_support: what the engine does with a frontend's hashes, in words; None if it
            always takes them.
    """

    backend_framework: BackendFramework
    package_version: str | None = None
    engine_version: str | None = None
    mm_hash_mode: HashMode = HashMode.PAD_VALUE
    mm_hash_hex_chars: int = 16
    transports: tuple[str, ...] = ()
    max_item_bytes: int | None = None
    host_id: str = ""
    modalities: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    mm_routing: MmRouting = "exact"
    mm_hash_support: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the worker runs this package."""
        return self.package_version is not None

    def shares_memory_with(self, host_id: str) -> bool:
        """Whether shared memory of a process with that `host_identity` can reach this worker."""
        return bool(host_id) and host_id == self.host_id

    def to_runtime_data(self) -> dict[str, Any]:
        """The card as ``EngineConfig.runtime_data``: plain JSON values."""
        data: dict[str, Any] = {"backend_framework": self.backend_framework}
        if self.is_ours:
            data[EXT_KEY] = {
                "package_version": self.package_version,
                "engine_version": self.engine_version,
                "mm_hash_mode": self.mm_hash_mode.value,
                "mm_hash_hex_chars": self.mm_hash_hex_chars,
                "transports": list(self.transports),
                "max_item_bytes": self.max_item_bytes,
                "host_id": self.host_id,
                "modalities": list(self.modalities),
                "patches": list(self.patches),
                "mm_routing": self.mm_routing,
                "mm_hash_support": self.mm_hash_support,
            }
        return data

    @classmethod
    def from_runtime_data(cls, runtime_data: Mapping[str, Any], worker: str = "?") -> WorkerCard:
        """Read a card. Keys that this version does not know are left alone.

        Args:
            runtime_data: of the worker's ``runtime_config``.
            worker: what to call it in an error.

        Raises:
            StartupError: the card does not say which engine the worker runs, or is malformed.
        """
        framework = runtime_data.get("backend_framework")
        if framework not in get_args(BackendFramework):
            said = "does not say" if framework is None else f"says {framework!r} for"
            raise StartupError(
                f"the card of worker {worker} {said} backend_framework; expected "
                f"{' or '.join(map(repr, get_args(BackendFramework)))} in its runtime_data"
            )
        backend = cast(BackendFramework, framework)
        raw = runtime_data.get(EXT_KEY)
        if raw is None:
            return cls(backend)
        try:
            ext = _Ext.model_validate(raw)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join([EXT_KEY, *map(str, first["loc"])])
            raise StartupError(
                f"the card of worker {worker} is malformed: {where}: {first['msg']}"
            ) from None
        return cls(backend, **dict(ext))

    def describe(self) -> str:
        """One line for a log or an error."""
        engine = f"{self.backend_framework} {self.engine_version or '(version unknown)'}"
        if not self.is_ours:
            return f"{engine}, without dynamo-worker-ext, {self.mm_hash_mode.value}"
        parts = [
            engine,
            f"dynamo-worker-ext {self.package_version}",
            f"{self.mm_hash_mode.value} with {self.mm_hash_hex_chars} hex",
            f"transports {'+'.join(self.transports) or 'none'}",
            f"modalities {'+'.join(self.modalities) or 'none'}",
        ]
        if self.host_id:
            parts.append(f"host {self.host_id}")
        if self.mm_routing != "exact":
            parts.append(f"{self.mm_routing} routing of media")
        if self.patches:
            parts.append(f"patches {'+'.join(self.patches)}")
        return ", ".join(parts)


class _Ext(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    package_version: str
    engine_version: str | None = None
    mm_hash_mode: HashMode = HashMode.PAD_VALUE
    mm_hash_hex_chars: Literal[16, 64] = 16
    transports: _Names = ()
    max_item_bytes: Annotated[int, Field(ge=1)] | None = None
    host_id: Annotated[str, Field(max_length=64)] = ""
    modalities: _Names = ()
    patches: _Names = ()
    mm_routing: MmRouting = "exact"
    mm_hash_support: Annotated[str, Field(max_length=256)] | None = None


#: What has to be equal on the cards of one model's workers.
_AGREED: Final = (
    "backend_framework",
    "mm_hash_mode",
    "mm_hash_hex_chars",
    "mm_routing",
    "modalities",
)


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Workers of one model say different things that have to be equal.

    Attributes:
        what: the field of the card.
        values: who says what.
    """

    what: str
    values: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        said = "; ".join(f"{', '.join(who)} says {value}" for value, who in self.values.items())
        return f"workers of one model disagree on {self.what}: {said}"


def disagreements(cards: Mapping[str, WorkerCard]) -> list[Disagreement]:
    """What workers of one model have to agree on for routing to be exact, and do not.

    A frontend hashes a request once, for all of them: whoever hashes otherwise never has a hit,
    and nothing looks broken. So nothing is averaged or put to the vote.

    Args:
        cards: by worker.
    """
    result = []
    for what in _AGREED:
        values: dict[str, tuple[str, ...]] = {}
        for worker, card in cards.items():
            # A plain Dynamo worker does not say what it takes.
            if what == "modalities" and not card.is_ours:
                continue
            value = getattr(card, what)
            text = "+".join(value) or "none" if isinstance(value, tuple) else str(value)
            values[text] = (*values.get(text, ()), worker)
        if len(values) > 1:
            result.append(Disagreement(what, values))
    return result


def host_identity() -> str:
    """Tells whether two processes can share memory: 16 hex characters, empty if it cannot be known.

    Equal for processes that run on the same boot of a machine, see the same ``/dev/shm`` (each
    container has its own unless told otherwise) and run as the same user, whose segments others
    cannot open.
    """
    try:
        boot_id = _BOOT_ID.read_text().strip()
        shm = _SHM.stat()
    except OSError:
        return ""
    seen = f"{boot_id}:{shm.st_dev}:{shm.st_ino}:{os.getuid()}"
    return hashlib.sha256(seen.encode()).hexdigest()[:16]

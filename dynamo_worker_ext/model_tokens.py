"""The tokens that stand for media, from a model's own files.

A router is exact only if it knows which token fills an item's place in the expanded prompt, which
one the chat template writes for it, and what the worker's processor puts before and between. None
of these can be guessed: a wrong one changes every block hash, and nothing looks broken. So each
value says where it came from, and what cannot be proven switches exact routing off.

Nothing here imports torch, transformers or an engine; the tokenizer needs ``tokenizers``, which
every engine brings.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dynamo_worker_ext.errors import StartupError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

#: Families whose image is one chat token in the prompt and nothing but one token, repeated, in the
#: expanded prompt. Tested against vLLM's and transformers' processors.
_REPEATED: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "llava_next")
PHI3: Final = "phi3_v"

#: Source: vLLM 0.31.0, ``model_executor/models/phi3v.py``; no file of the model says it.
PHI3_IMAGE_ID: Final = 32044
_PHI3_IMAGE: Final = "<|image|>"
_PHI3_TAG: Final = re.compile(r"(<\|image_\d+\|>)")

#: Names of single special tokens in ``tokenizer_config.json``.
_NAMED: Final = tuple(f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True, slots=True)
class Token:
    """A token, and where that was found.

    Attributes:
        text: how it is written.
        id: None where it is no single token but plain text.
        source: file and key.
    """

    text: str
    id: int | None
    source: str


@dataclass(frozen=True)
class RoutingTokens:
    """What a router has to know of one model.

    Attributes:
        model_type: of its ``config.json``.
        image: fills an image's place in the expanded prompt; None for a model without images.
        video: the same for videos.
        chat_image: what the chat template, or the frontend, writes for one image.
        bos: what the processor puts before a text; None where it puts nothing. An engine that is
            given token ids leaves them as they are, but for Phi-3-vision.
        exact: whether `expand` and `process` give what the worker's processor gives.
        reason: why not.
    """

    model_type: str
    image: Token | None = None
    video: Token | None = None
    chat_image: Token | None = None
    bos: Token | None = None
    exact: bool = True
    reason: str = ""
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    #: Special tokens after which vLLM takes out a space when it re-encodes (Phi-3-vision).
    spaced: tuple[str, ...] = field(default=(), repr=False)

    @property
    def media_ids(self) -> frozenset[int]:
        """The ids that fill media positions, as `kv_events.Normalizer` takes them."""
        tokens = (self.image, self.video)
        return frozenset(token.id for token in tokens if token is not None and token.id is not None)

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered chat prompt, nothing added."""
        self._require_exact()
        if self.tokenizer is None:
            raise StartupError(f"models of type {self.model_type!r} take no media to route by")
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def process(self, text: str, counts: Sequence[int]) -> list[int]:
        """The expanded prompt that the Hugging Face processor makes of a text.

        Args:
            text: with one chat placeholder an image.
            counts: embedding tokens of each image.

        Raises:
            StartupError: exactness is off.
            ValueError: the text has not as many placeholders as there are counts.
        """
        self._require_exact()
        if self.model_type == PHI3:
            return self._splice(text, counts)
        return [*self._bos_ids, *self._repeat(self.encode(text), counts)]

    def expand(self, token_ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """The expanded prompt that a vLLM worker makes of a frontend's token ids.

        Args, Raises: as `process`.
        """
        self._require_exact()
        if self.model_type == PHI3 and counts and self.tokenizer is not None:
            return self._reencode(self.tokenizer, token_ids, counts)
        return self._repeat(token_ids, counts)

    def _require_exact(self) -> None:
        if not self.exact:
            raise StartupError(f"exact routing of media is off: {self.reason}")

    @property
    def _bos_ids(self) -> list[int]:
        return [] if self.bos is None or self.bos.id is None else [self.bos.id]

    def _repeat(self, token_ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        chat = None if self.chat_image is None else self.chat_image.id
        found = sum(token == chat for token in token_ids)
        if found != len(counts):
            raise ValueError(f"{len(counts)} image(s), but {found} placeholder(s) for them")
        left = iter(counts)
        expanded: list[int] = []
        for token in token_ids:
            expanded += [token] * next(left) if token == chat else [token]
        return expanded

    def _reencode(
        self, tokenizer: Tokenizer, token_ids: Sequence[int], counts: Sequence[int]
    ) -> list[int]:
        """Phi-3-vision in vLLM: decoded, and each stretch between images encoded anew."""
        ids = list(token_ids)
        if ids[:1] == self._bos_ids:
            del ids[0]
        text: str = tokenizer.decode(ids, skip_special_tokens=False)
        for special in self.spaced:
            text = text.replace(special + " ", special)
        expanded = self._splice(text, counts)
        # vLLM compares two tokens with all that this text encodes to: where the tokenizer puts no
        # space token between, it takes one image token away.
        if expanded[:2] == self.encode(f"<s> {_PHI3_IMAGE}"):
            del expanded[1]
        return expanded

    def _splice(self, text: str, counts: Sequence[int]) -> list[int]:
        left = {f"<|image_{number}|>": count for number, count in enumerate(counts, start=1)}
        ids: list[int] = []
        for i, part in enumerate(_PHI3_TAG.split(text)):
            if i % 2 == 0:
                ids += [*self._bos_ids, *self.encode(part)]
            elif part in left:
                ids += [PHI3_IMAGE_ID] * left.pop(part)
            else:
                ids += self.encode(part)
        if left:
            raise ValueError(f"{len(counts)} image(s), but no {', '.join(left)} in the prompt")
        return ids


def resolve_routing_tokens(model_dir: str | Path) -> RoutingTokens:
    """Read them from a model's folder; every file is read once.

    Logs one warning where exactness cannot be proven; the result then has ``exact=False`` and a
    ``reason``, and whatever could be found.

    Raises:
        StartupError: the folder has no readable ``config.json``.
    """
    files = _Files(Path(model_dir))
    config = files.json("config.json")
    if config is None:
        raise StartupError(f"{model_dir} has no config.json, so it is no model's folder")
    found: dict[str, Any] = {"model_type": str(config.get("model_type", "unknown"))}
    try:
        _find(files, config, found)
    except _NotExact as error:
        log.warning("exact routing of media is off for %s: %s", model_dir, error)
        return RoutingTokens(**found, exact=False, reason=str(error))
    return RoutingTokens(**found)


class _NotExact(Exception):
    """Something that exactness depends on cannot be proven."""


class _Files:
    """The files of one model, each asked for once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _bytes(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StartupError(f"{self._folder / name} cannot be read: {error}") from error

    def json(self, name: str) -> dict[str, Any] | None:
        """Its content; None where there is no such file.

        Raises:
            StartupError: it is no JSON object.
        """
        if (raw := self._bytes(name)) is None:
            return None
        try:
            content = json.loads(raw)
        except ValueError as error:
            raise StartupError(f"{self._folder / name} is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise StartupError(f"{self._folder / name} is no JSON object")
        return content

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        return self.json("tokenizer_config.json") or {}

    def _declared(self) -> list[tuple[int, str, Mapping[str, Any]]]:
        declared = self.tokenizer_config.get("added_tokens_decoder") or {}
        try:
            return sorted(
                ((int(number), str(entry["content"]), entry) for number, entry in declared.items()),
                key=lambda one: one[0],
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StartupError(
                f"{self._folder / 'tokenizer_config.json'}: added_tokens_decoder is malformed: "
                f"{error!r}"
            ) from error

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """`tokenizer.json`, with the special tokens that only ``tokenizer_config.json`` has.

        Raises:
            _NotExact: it cannot be what the worker's processor has.
        """
        from tokenizers import AddedToken, Tokenizer

        raw = self._bytes("tokenizer.json")
        if raw is None:
            raise _NotExact("there is no tokenizer.json, which frontends encode with")
        try:
            tokenizer = Tokenizer.from_buffer(raw)
        except Exception as error:  # the only class that the library raises
            raise _NotExact(f"tokenizer.json cannot be loaded: {error}") from error
        for number, text, entry in self._declared():
            have = tokenizer.token_to_id(text)
            if have is None and entry.get("special"):
                flags = {k: entry.get(k, False) for k in ("lstrip", "rstrip", "single_word")}
                token = AddedToken(text, special=True, normalized=False, **flags)
                tokenizer.add_special_tokens([token])
                have = tokenizer.token_to_id(text)
            if have is None:
                # Frontends cut it into pieces, transformers takes it for one token.
                raise _NotExact(f"tokenizer.json does not have {text!r} of tokenizer_config.json")
            if have != number:
                raise _NotExact(
                    f"{text!r} is {have} by tokenizer.json, {number} by tokenizer_config.json"
                )
        return tokenizer

    def require_equal_flags(self) -> None:
        """Compare how both files have added tokens matched in a text.

        transformers goes by ``tokenizer_config.json``, frontends by ``tokenizer.json``. It matters
        where a worker encodes text anew.

        Raises:
            _NotExact: they differ.
        """
        added = self.tokenizer.get_added_tokens_decoder()
        for number, text, entry in self._declared():
            for flag in ("lstrip", "rstrip", "single_word", "normalized"):
                have = getattr(added.get(number), flag, None)
                if flag in entry and have is not None and have != entry[flag]:
                    raise _NotExact(
                        f"{text!r} has {flag}={have} in tokenizer.json, {entry[flag]} in "
                        "tokenizer_config.json"
                    )

    def bos(self) -> Token | None:
        """What the processor puts before a text.

        Where there is a ``tokenizer.json``, transformers 5 goes by its post-processor and does
        not look at ``add_bos_token``.
        """
        added = self.tokenizer.encode("").ids
        if not added:
            return None
        if len(added) != 1:
            raise _NotExact(f"tokenizer.json's post_processor puts {added} around a text")
        text = self.tokenizer.id_to_token(added[0])
        return Token(text, added[0], "tokenizer.json: post_processor")


def _find(files: _Files, config: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Put what is found into `found`.

    Raises:
        _NotExact: some of it cannot be proven.
    """
    kind = found["model_type"]
    for modality in ("image", "video"):
        for key in (f"{modality}_token_id", f"{modality}_token_index"):
            if isinstance(config.get(key), int):
                found[modality] = Token("", config[key], f"config.json: {key}")
                break
    if kind == PHI3:
        found["image"] = Token(_PHI3_IMAGE, PHI3_IMAGE_ID, "vLLM 0.31.0's Phi-3-vision")
    vision = config.get("vision_config")
    if "image" not in found and vision is None:
        return  # no images, nothing to be exact about
    if kind not in (*_REPEATED, PHI3):
        raise _NotExact(f"how models of type {kind!r} expand an image was not tested")
    if isinstance(vision, dict) and vision.get("model_type") == "pixtral":
        raise _NotExact("Pixtral's images hold row breaks, which are other tokens")
    if "image" not in found:
        raise _NotExact("config.json has no image_token_id")
    tokenizer = found["tokenizer"] = files.tokenizer
    found["bos"] = files.bos()
    for modality in ("image", "video"):
        if modality in found:
            found[modality] = _named(tokenizer, found[modality])
    if kind == PHI3:
        files.require_equal_flags()
        if found["image"].text != _PHI3_IMAGE:
            raise _NotExact(
                f"vLLM fills images with {PHI3_IMAGE_ID}, which is {found['image'].text!r} here, "
                f"not {_PHI3_IMAGE!r}"
            )
        found["chat_image"] = Token("<|image_1|>", None, "vLLM 0.31.0's Phi-3-vision")
        found["spaced"] = _special_texts(files.tokenizer_config)
        return
    found["chat_image"] = _chat_image(files, found["image"])


def _named(tokenizer: Tokenizer, token: Token) -> Token:
    text = tokenizer.id_to_token(token.id)
    if text is None:
        raise _NotExact(f"{token.source} is {token.id}, which the tokenizer does not have")
    return Token(text, token.id, token.source)


def _chat_image(files: _Files, image: Token) -> Token:
    """What the prompt holds for one image, proven to be one token that text around leaves alone."""
    processor = files.json("processor_config.json") or {}
    text, source = image.text, "tokenizer.json"
    if isinstance(processor.get("image_token"), str):
        text, source = processor["image_token"], "processor_config.json: image_token"
    tokenizer = files.tokenizer
    for around in ("", "a", " ", "\n"):
        ids = tokenizer.encode(f"{around}{text}{around}", add_special_tokens=False).ids
        if ids.count(image.id) != 1:
            raise _NotExact(
                f"{text!r} ({source}) is not the one token {image.id} that {image.source} names"
            )
    return Token(text, image.id, source)


def _special_texts(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What transformers calls ``all_special_tokens``."""
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    named = [config.get(name) for name in _NAMED]
    named += more.values() if isinstance(more, dict) else more
    texts = [one.get("content") if isinstance(one, dict) else one for one in named]
    return tuple(dict.fromkeys(text for text in texts if text))

"""Raw media: Dynamo's loaders, behind a cache keyed by content.

URL policy, size and time limits, redirects and the URL-keyed image cache are those of
``dynamo.common.multimodal``; their ``DYN_MM_*`` variables hold here too. On top of that a data
URI that was decoded before is not decoded again. Lives in the worker process.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from dynamo_worker_ext.errors import MediaLoadError, RequestError, UnsupportedOptionError
from dynamo_worker_ext.wire import Modality

#: Characters of a URI that its entry is found by.
_SAMPLED: Final = 1024

#: Seconds for a download, as Dynamo's own loaders (1.6.1) have it.
_FETCH_S: Final[Mapping[Modality, float]] = {"image": 30.0, "video": 60.0}

#: URIs that are remembered as seen once.
_SEEN: Final = 4096


class CacheStatistics(NamedTuple):
    """State of a `ContentCache`: entries, their bytes, and lookups since it was made."""

    entries: int
    bytes: int
    hits: int
    misses: int


class ContentCache:
    """An LRU of decoded images by their data URIs, bounded in bytes.

    A URI of megabytes takes milliseconds to hash, for nothing where it is new. Here a few of its
    characters find the one entry that it may be equal to, and a comparison decides.

    A picture is kept when it comes for the second time: most come once, and the memory that such a
    one gives back is where the next is decoded, without the first touch of new pages (2 ms for
    1024 x 1024 pixels and their URI).

    Args:
        max_bytes: of pictures and URIs; 0 switches it off.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._entries: OrderedDict[tuple[int, str], tuple[str, Any, int]] = OrderedDict()
        self._bytes = self._hits = self._misses = 0

    def get(self, uri: str) -> Any | None:
        key = _sample(uri)
        entry = self._entries.get(key)
        if entry is None or entry[0] != uri:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return entry[1]

    def put(self, uri: str, image: Any) -> None:
        """Keep `image`, an RGB picture with a ``size`` of (width, height), if it came before."""
        width, height = image.size
        nbytes = width * height * 3 + len(uri)
        if nbytes > self._max_bytes:
            return
        key = _sample(uri)
        if (known := hash(key)) not in self._seen:
            self._seen[known] = None
            if len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
            return
        if (before := self._entries.pop(key, None)) is not None:
            self._bytes -= before[2]
        self._entries[key] = (uri, image, nbytes)
        self._bytes += nbytes
        while self._bytes > self._max_bytes:
            _, (_, _, freed) = self._entries.popitem(last=False)
            self._bytes -= freed

    def statistics(self) -> CacheStatistics:
        return CacheStatistics(len(self._entries), self._bytes, self._hits, self._misses)


def _sample(uri: str) -> tuple[int, str]:
    """Its length, and some thousand of its characters."""
    return len(uri), uri[:: len(uri) // _SAMPLED + 1]


class MediaLoader:
    """Loads raw media of one request.

    Args:
        frontend_decoding: take pixels that the Rust frontend decoded (``--frontend-decoding``).
        cache_mb: size of the content cache in MB.
        decode_videos: False for an engine that decodes videos itself, and takes their files.
    """

    def __init__(
        self, *, frontend_decoding: bool, cache_mb: int, decode_videos: bool = True
    ) -> None:
        from dynamo.common.http.url_validator import UrlValidationPolicy
        from dynamo.common.multimodal.audio_loader import AudioLoader
        from dynamo.common.multimodal.image_loader import ImageLoader
        from dynamo.common.multimodal.video_loader import VideoLoader

        self.cache = ContentCache(cache_mb * 1024 * 1024)
        self._decode_videos = decode_videos
        self._images = ImageLoader(enable_frontend_decoding=frontend_decoding)
        self._videos = VideoLoader(enable_frontend_decoding=frontend_decoding)
        self._audios = AudioLoader(enable_frontend_decoding=frontend_decoding)
        self._policy = UrlValidationPolicy.from_env()

    async def load(
        self,
        modality: Modality,
        items: Sequence[Mapping[str, Any]],
        *,
        io_kwargs: Mapping[str, Any] | None = None,
        cache_scope: str | None = None,
    ) -> list[Any]:
        """Fetch and decode the items of one modality, in order.

        Returns:
            PIL images (RGB); or (frames, metadata) of videos, or their files as bytes where they
            are not decoded; or (samples, rate) of audio.

        Raises:
            MediaLoadError: with the HTTP status of the cause (404, 408, 413, 415, else 400).
            UnsupportedOptionError: `io_kwargs` for videos that are not decoded here.
        """
        for item in items:
            if "UuidOnly" in item:
                raise MediaLoadError(
                    f"{modality} {item['UuidOnly']!r} is named by its uuid alone and this worker "
                    "does not hold it; send it with its URL"
                )
            _check_data_uri_size(modality, item)
        try:
            if modality == "image":
                return await self._load_images(items, cache_scope)
            if modality == "video":
                options = io_kwargs.get("video") if io_kwargs else None
                if options is not None and not isinstance(options, dict):
                    raise MediaLoadError("media_io_kwargs.video is an object")
                if not self._decode_videos:
                    return await self._load_files(items, options)
                return list(await self._videos.load_video_batch(list(items), options or {}))
            return list(await self._audios.load_audio_batch(list(items)))
        except RequestError:
            raise
        except Exception as error:
            raise _as_media_error(modality, error) from error

    async def _load_files(
        self, items: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None
    ) -> list[Any]:
        if options:
            raise UnsupportedOptionError(
                "media_io_kwargs.video cannot be honoured by this worker, whose engine decodes "
                "videos itself; leave it out"
            )
        return await asyncio.gather(*(self._load_file(item) for item in items))

    async def _load_file(self, item: Mapping[str, Any]) -> Any:
        if isinstance(url := item.get("Url"), str):
            return await self.fetch(url, modality="video")
        (decoded,) = await self._videos.load_video_batch([dict(item)])
        return decoded

    async def fetch(
        self, url: str, max_bytes: int | None = None, *, modality: Modality = "image"
    ) -> bytes:
        """What lies behind a URL, as it is.

        Args:
            url: a base64 data URI or an http(s) URL, or of a video that of a local file; held to
                the policy and limits of Dynamo's own loader of that modality.
            max_bytes: of the file, where that is less.
            modality: in place of what, or of what, it is.

        Raises:
            MediaLoadError: as `load` raises it.
        """
        from dynamo.common.http import HttpError, HttpTimeoutError, fetch_bytes
        from dynamo.common.http.media_reference import max_media_bytes
        from dynamo.common.http.url_validator import validate_media_url, validate_url
        from dynamo.common.multimodal.media_source import (
            decode_data_uri,
            is_local_media_url,
            read_local_media_bytes,
        )

        _check_data_uri_size(modality, {"Url": url})
        limit = max_media_bytes() if max_bytes is None else min(max_bytes, max_media_bytes())
        validate = validate_media_url if modality == "video" else validate_url
        content: bytes
        try:
            url = await validate(url, self._policy)
            if url.startswith("data:"):
                content = await asyncio.to_thread(decode_data_uri, url, limit)
            elif is_local_media_url(url):
                content = await read_local_media_bytes(url, self._policy)
            else:
                content = await fetch_bytes(
                    url, _FETCH_S[modality], policy=self._policy, max_bytes=limit
                )
        except HttpTimeoutError as error:
            raise MediaLoadError(f"{modality} could not be loaded: {error}", status=408) from error
        except (HttpError, ValueError) as error:
            raise _as_media_error(modality, error) from error
        return content

    async def _load_images(
        self, items: Sequence[Mapping[str, Any]], cache_scope: str | None
    ) -> list[Any]:
        return await asyncio.gather(*(self._load_image(item, cache_scope) for item in items))

    async def _load_image(self, item: Mapping[str, Any], cache_scope: str | None) -> Any:
        url = item.get("Url")
        # Whoever has the whole URI has the picture, so entries need no scope.
        uri = url if isinstance(url, str) and url.startswith("data:") else None
        if uri is not None and (image := self.cache.get(uri)) is not None:
            return image
        if isinstance(url, str):  # a batch would hide what is wrong behind a bare Exception
            image = await self._images.load_image(url, cache_scope=cache_scope)
        else:
            (image,) = await self._images.load_image_batch([dict(item)], cache_scope=cache_scope)
        if uri is not None:
            self.cache.put(uri, image)
        return image


def _check_data_uri_size(modality: Modality, item: Mapping[str, Any]) -> None:
    """Hold data URIs to the limit that Dynamo's loaders set for downloads."""
    from dynamo.common.http.media_reference import max_media_bytes

    url = item.get("Url")
    if not isinstance(url, str) or not url.startswith("data:"):
        return
    limit = max_media_bytes()
    size = (len(url) - url.find(",") - 1) * 3 // 4
    if size > limit:
        raise MediaLoadError(
            f"{modality} data URI of about {size} bytes; at most {limit} are accepted "
            "(DYN_MM_MAX_FILE_SIZE_MB)",
            status=413,
        )


def _as_media_error(modality: Modality, error: Exception) -> Exception:
    """The client's fault as `MediaLoadError` with its status; anything else as it is."""
    from dynamo.common.http.base import HttpError, HttpStatusError
    from dynamo.common.multimodal.codec_errors import MissingMediaDecoderError

    text = str(error)
    # Loaders quote what they were given; a data URI may be megabytes long.
    text = text if len(text) <= 500 else f"{text[:500]}..."
    if isinstance(error, HttpStatusError):
        return MediaLoadError(f"{modality} could not be loaded: {text}", status=error.status)
    if isinstance(error, MissingMediaDecoderError):
        return MediaLoadError(f"this worker cannot decode the {modality}: {text}", status=415)
    if isinstance(error, (HttpError, ValueError)):
        return MediaLoadError(f"{modality} could not be loaded: {text}")
    if modality == "image" and _is_bad_picture(error):
        return MediaLoadError(f"image could not be decoded: {text}")
    return error


def _is_bad_picture(error: Exception) -> bool:
    """Whether Pillow found fault with the picture, and not this worker with itself."""
    from PIL import Image

    # A truncated file is a plain OSError; one of the operating system's has a number or a subclass.
    if type(error) is OSError:
        return error.errno is None
    return isinstance(error, (Image.DecompressionBombError, SyntaxError))

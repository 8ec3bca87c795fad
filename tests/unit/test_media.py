"""Raw media through Dynamo's loaders, and the cache in front of them."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from dynamo.common import http
from PIL import Image

from dynamo_worker_ext.errors import MediaLoadError
from dynamo_worker_ext.media import ContentCache, MediaLoader
from tests.pictures import PictureServer


def picture(color: int = 0, side: int = 8) -> Image.Image:
    return Image.new("RGB", (side, side), (color, 0, 0))


def data_uri(color: int = 0, kind: str = "PNG") -> str:
    buffer = io.BytesIO()
    picture(color).save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


@pytest.fixture
def loader() -> MediaLoader:
    return MediaLoader(frontend_decoding=False, cache_mb=1)


async def test_images_are_decoded_in_order(loader: MediaLoader) -> None:
    images = await loader.load("image", [{"Url": data_uri(c)} for c in (1, 2, 3)])
    assert [image.getpixel((0, 0))[0] for image in images] == [1, 2, 3]


async def test_a_data_uri_is_kept_from_its_second_time_on(loader: MediaLoader) -> None:
    await loader.load("image", [{"Url": data_uri(7)}])
    assert loader.cache.statistics().entries == 0
    (second,) = await loader.load("image", [{"Url": data_uri(7)}])
    (third,) = await loader.load("image", [{"Url": data_uri(7)}])
    assert third is second
    assert loader.cache.statistics().hits == 1


async def test_content_decides_and_not_position(loader: MediaLoader) -> None:
    await loader.load("image", [{"Url": data_uri(7)}])
    (other,) = await loader.load("image", [{"Url": data_uri(8)}])
    assert other.getpixel((0, 0))[0] == 8


@pytest.mark.parametrize(
    ("item", "status"),
    [
        ({"Url": "data:image/png;base64,AAAA"}, 415),
        ({"Url": "data:image/png;base64,%%%"}, 400),
        ({"Url": "data:text/plain;base64,AAAA"}, 400),
        ({"Url": "file:///etc/passwd"}, 400),
        ({"Url": "ftp://127.0.0.1/x.png"}, 400),
        ({"Url": "http://127.0.0.1:1/x.png"}, 400),
        ({"Decoded": {}}, 400),
        ({"UuidOnly": "mine"}, 400),
        ({}, 400),
    ],
)
async def test_what_cannot_be_loaded_is_the_clients_error(
    loader: MediaLoader, item: dict[str, Any], status: int
) -> None:
    with pytest.raises(MediaLoadError) as caught:
        await loader.load("image", [item])
    assert caught.value.status == status
    assert len(str(caught.value)) < 700


def truncated() -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(buffer, "JPEG")
    return buffer.getvalue()[:1000]


def of_chunks(*chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG."""
    data = b"\x89PNG\r\n\x1a\n"
    for name, body in chunks:
        data += struct.pack(">I", len(body)) + name + body
        data += struct.pack(">I", zlib.crc32(name + body))
    return data


def header(width: int, height: int) -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)


#: A few bytes that ask for 600 MB.
BOMB = of_chunks(header(20_000, 10_000), (b"IDAT", zlib.compress(b"")))
#: Of a kind that Pillow makes a SyntaxError of.
BROKEN = of_chunks(header(8, 8), (b"IDAT", zlib.compress(bytes(200))[:4]), (bytes(4), b""))


@pytest_asyncio.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PictureServer]:
    monkeypatch.setenv("DYN_MM_ALLOW_INTERNAL", "1")
    monkeypatch.setattr(http, "_default", None)  # Dynamo's client, which belongs to one event loop
    with PictureServer() as one:
        yield one
    await http.close_http_client()


@pytest.mark.parametrize("over_http", [True, False])
@pytest.mark.parametrize(
    "data", [truncated(), BOMB, BROKEN], ids=["truncated", "decompression bomb", "broken"]
)
async def test_a_picture_that_cannot_be_decoded_is_the_clients_error(
    server: PictureServer, data: bytes, over_http: bool
) -> None:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    if over_http:
        url = server.file(data, ".png")
    loader = MediaLoader(frontend_decoding=False, cache_mb=1)
    with pytest.raises(MediaLoadError) as caught:
        await loader.load("image", [{"Url": data_uri()}, {"Url": url}])
    assert caught.value.status == 400


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError(), KeyError(1)])
async def test_what_goes_wrong_in_the_worker_is_not_laid_to_the_client(
    server: PictureServer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_: Any) -> Any:
        raise error

    loader = MediaLoader(frontend_decoding=False, cache_mb=1)
    monkeypatch.setattr(loader._images, "_open_image", fail)
    with pytest.raises(type(error)):
        await loader.load("image", [{"Url": server.url(picture())}])


async def test_dynamos_url_policy_stays_in_force(loader: MediaLoader) -> None:
    # Loopback is refused unless DYN_MM_ALLOW_INTERNAL says otherwise.
    with pytest.raises(MediaLoadError):
        await loader.load("image", [{"Url": "http://127.0.0.1:80/x.png"}])


async def test_a_data_uri_over_the_size_limit_is_413(
    loader: MediaLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_MM_MAX_FILE_SIZE_MB", "1")
    with pytest.raises(MediaLoadError, match="DYN_MM_MAX_FILE_SIZE_MB") as caught:
        await loader.load("image", [{"Url": "data:image/png;base64," + "A" * 3_000_000}])
    assert caught.value.status == 413


@pytest.mark.parametrize("modality", ["video", "audio"])
async def test_videos_and_audio_that_are_none_are_the_clients_error(
    loader: MediaLoader, modality: Any
) -> None:
    with pytest.raises(MediaLoadError):
        await loader.load(modality, [{"Url": f"data:{modality}/mp4;base64,AAAA"}])


async def test_video_options_of_another_form_are_refused(loader: MediaLoader) -> None:
    with pytest.raises(MediaLoadError, match="media_io_kwargs"):
        await loader.load("video", [{"Url": "data:video/mp4;base64,AAAA"}], io_kwargs={"video": 1})


def keep(cache: ContentCache, uri: str, image: Any) -> None:
    """Put a picture that came before."""
    cache.put(uri, image)
    cache.put(uri, image)


def test_the_cache_is_bounded_in_bytes_and_forgets_the_oldest() -> None:
    cache = ContentCache(3 * (8 * 8 * 3 + 1))
    for uri in "abc":
        keep(cache, uri, picture())
    assert cache.get("a") is not None
    keep(cache, "d", picture())
    assert cache.get("b") is None
    assert cache.get("a") is not None
    assert cache.statistics().bytes == 3 * (8 * 8 * 3 + 1)


def test_pictures_whose_uris_differ_in_one_character_are_two() -> None:
    """Also in one that entries are not found by; the later of them is kept."""
    cache = ContentCache(1 << 20)
    base = "data:image/png;base64," + "A" * 100_000
    first, second = picture(), picture()
    keep(cache, base, first)
    other = base[:50_001] + "B" + base[50_002:]
    assert cache.get(other) is None
    assert cache.get(base) is first
    cache.put(other, second)
    assert cache.get(other) is second
    assert cache.get(base) in (first, None)
    assert cache.statistics().bytes == cache.statistics().entries * (8 * 8 * 3 + len(base))


def test_what_was_seen_once_is_forgotten_in_time() -> None:
    cache = ContentCache(1 << 20)
    for number in range(5000):
        cache.put(f"{number:05}", picture())
    cache.put("00000", picture())
    assert cache.statistics().entries == 0
    cache.put("04999", picture())
    assert cache.statistics().entries == 1


def test_a_picture_larger_than_the_cache_is_not_kept() -> None:
    cache = ContentCache(100)
    keep(cache, "a", picture(side=64))
    assert cache.statistics().entries == 0


def test_a_cache_of_nothing_keeps_nothing() -> None:
    cache = ContentCache(0)
    keep(cache, "a", picture())
    assert cache.get("a") is None

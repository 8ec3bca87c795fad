"""Pictures for tests, and a server on loopback that has them."""

from __future__ import annotations

import base64
import io
import itertools
import re
import tempfile
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from PIL import Image

_numbers = itertools.count()


def picture(seed: int | None = None, size: int = 224) -> Image.Image:
    """A picture of 8 x 8 coloured squares; another one each time unless `seed` is given."""
    seed = next(_numbers) if seed is None else seed
    squares = np.random.default_rng([7, seed]).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((size, size), Image.Resampling.NEAREST)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_uri(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def part(url: str) -> dict[str, Any]:
    """A content part of a chat message."""
    return {"type": "image_url", "image_url": {"url": url}}


def video(frames: int = 4, size: int = 112) -> bytes:
    """An MP4 of pictures, two a second; another one each time."""
    import cv2

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "video.mp4")
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 2, (size, size))
        for _ in range(frames):
            writer.write(np.asarray(picture(size=size)))
        writer.release()
        return path.read_bytes()


def video_part(data: bytes) -> dict[str, Any]:
    """A content part of a chat message."""
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": url}}


class PictureServer:
    """Serves pictures over http; use it as a context manager.

    Dynamo's Rust frontend asks for the first bytes alone, and gives up on exact routing where
    the server does not answer Range with 206.

    Args:
        ranges: whether this one does.
    """

    def __init__(self, *, ranges: bool = True) -> None:
        self._ranges = ranges
        self._files: dict[str, bytes] = {}
        self.paths: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def url(self, image: Image.Image) -> str:
        """A new URL of `image`."""
        return self.file(png(image), ".png")

    def file(self, data: bytes, suffix: str) -> str:
        """A new URL of a file."""
        path = f"/{next(_numbers)}{suffix}"
        self._files[path] = data
        return f"http://127.0.0.1:{self._server.server_port}{path}"

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        self.paths.append(request.path)
        data = self._files.get(request.path)
        if data is None:
            request.send_error(404)
            return
        headers: Mapping[str, str] = {"Content-Type": "image/png"}
        asked = request.headers.get("Range", "") if self._ranges else ""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
        if wanted:
            first = int(wanted[1])
            last = min(int(wanted[2] or len(data)), len(data) - 1)
            headers = {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"}
            data = data[first : last + 1]
        request.send_response(206 if wanted else 200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)

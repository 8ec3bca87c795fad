"""A TCP connection by way of the test, which does something in the middle of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class Relay:
    """Listens on loopback and passes on what comes, both ways, until it is closed.

    Args:
        port: of the server, on loopback.
        after_bytes: of the server in one connection; before these are passed on,
        then: is called, once.
    """

    def __init__(self, port: int, *, after_bytes: int, then: Callable[[], None]) -> None:
        self._target, self._after, self._then = port, after_bytes, then
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.done = False
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                for pair in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        total = 0
        with suppress(OSError):
            while data := source.recv(65536):
                total += len(data)
                if counted and total >= self._after and not self.done:
                    self._then()
                    self.done = True
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

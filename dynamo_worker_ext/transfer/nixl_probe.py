"""Trying the metadata of an unknown peer where a crash costs nothing.

UCX trusts addresses and keys: one damaged copy in twenty or so ends the process that loads it with
SIGSEGV or SIGABRT. So ``python -m dynamo_worker_ext.transfer.nixl_probe``, a child that lives as
long as the receiver, loads it first and reads one byte; only what it survives is loaded in the
worker. One that dies is replaced.

Both ways go frames of ``<I length>`` and as many bytes: `_ASK` and metadata there, a verdict and
a text back. The child's first frame says that it is ready.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Final

from dynamo_worker_ext.errors import PeerError, TransferError, TransportUnavailableError
from dynamo_worker_ext.transfer.nixl_agent import Agent, load_bindings
from dynamo_worker_ext.transfer.nixl_arena import Arena
from dynamo_worker_ext.transfer.nixl_request import MAX_METADATA_BYTES, Offer, rename

#: Seconds for the child to import nixl and start an agent, and for one verdict.
_START_S: Final = 60.0
_VERDICT_S: Final = 5.0
_HANG_S: Final = 10  # in the child, should nobody be left to end it

#: Metadata known to kill, so that it does so once; and of peers that are silent.
_MAX_REFUSED: Final = 1024

#: Seconds for which a peer that gave no answer is not asked again: others wait for their turn.
_SILENT_S: Final = 10.0

#: Failures after which the child is replaced: of each something may stay in its agent.
_MAX_FAILURES: Final = 500

_LENGTH: Final = struct.Struct("<I")
_ASK: Final = struct.Struct("<Q")  # address of a byte that the peer offers
_GOOD, _REFUSED, _DEAD = b"+", b"-", b"x"


class Probe:
    """The parent's half. `check` is for one thread at a time.

    Starting it does not wait for the child to be ready.

    Raises:
        TransportUnavailableError: no child can be started.
    """

    def __init__(self) -> None:
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._silent: OrderedDict[bytes, float] = OrderedDict()  # until when
        self._lock = threading.Lock()
        self._closed = False
        self._ready = False
        self._failures = 0
        self._child = self._start()

    @property
    def pid(self) -> int:
        """The child's process."""
        return self._child.pid

    def check(self, offer: Offer) -> None:
        """Make sure that the metadata of an offer is safe to load and its peer there.

        Raises:
            PeerError: ``peer_refused``, ``peer_dead``.
            TransportUnavailableError: the child does not start, or this is closed.
        """
        if (before := self._refused.get(offer.digest)) is not None:
            raise PeerError(before, reason="peer_refused")
        if self._silent.get(offer.digest, 0.0) > time.monotonic():
            raise PeerError(f"{offer.agent} did not answer a moment ago", reason="peer_dead")
        if self._child.poll() is not None:
            self._restart()  # somebody ended it while it had nothing to do; not this peer's fault
        if not self._ready:
            if self._receive(_START_S) is None:
                self._restart()
                raise TransportUnavailableError("the probe of NIXL peers does not start")
            self._ready = True
        body = _ASK.pack(offer.ptr) + offer.metadata
        answer: bytes | None = None
        with suppress(BrokenPipeError):
            _write(self._stdin(), _LENGTH.pack(len(body)) + body)
            answer = self._receive(_VERDICT_S)
        if answer is None:
            crashed = self._restart()
            if not crashed:
                self._silent.pop(offer.digest, None)
                self._silent[offer.digest] = time.monotonic() + _SILENT_S
                if len(self._silent) > _MAX_REFUSED:
                    self._silent.popitem(last=False)
                raise PeerError(
                    f"{offer.agent} did not answer within {_VERDICT_S:g} s", reason="peer_dead"
                )
            message = f"the metadata of {offer.agent} crashes NIXL ({crashed})"
            self._refused[offer.digest] = message
            if len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)
            raise PeerError(message, reason="peer_refused")
        verdict, text = answer[:1], answer[1:].decode(errors="replace")
        if verdict != _GOOD:
            self._failures += 1
            if self._failures >= _MAX_FAILURES:
                self._restart()
            reason = "peer_dead" if verdict == _DEAD else "peer_refused"
            raise PeerError(f"{offer.agent} cannot be used: {text}", reason=reason)

    def stop(self) -> None:
        """End the child. A `check` that runs in another thread ends with an error."""
        with self._lock:
            self._closed = True
            self._child.kill()
        self._child.wait()

    def close(self) -> None:
        """Release everything; no `check` may be running. A second call is a no-op."""
        self.stop()
        self._release()

    def _start(self) -> subprocess.Popen[bytes]:
        package = str(Path(__file__).parents[2])
        path = os.environ.get("PYTHONPATH")
        try:
            return subprocess.Popen(  # noqa: S603 - nothing in it comes from outside
                [sys.executable, "-P", "-m", __name__, load_bindings().__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{package}{os.pathsep}{path}" if path else package,
                    "UCX_HANDLE_ERRORS": "none",  # crashing is its job; no backtrace, no debugger
                },
            )
        except OSError as error:
            raise TransportUnavailableError(
                f"the probe of NIXL peers cannot be started: {error.strerror}"
            ) from None

    def _restart(self) -> str:
        """Replace the child; say how it had ended, if it had ended by itself."""
        with self._lock:
            if self._closed:
                raise TransportUnavailableError("the nixl transport is closed")
            with suppress(subprocess.TimeoutExpired):
                # Its pipe may break a moment before it can be waited for.
                self._child.wait(0.1)
            code = self._child.poll()
            self._child.kill()
            self._child.wait()
            self._release()
            self._ready = False
            self._failures = 0
            self._child = self._start()
        return "" if code is None else f"signal {-code}" if code < 0 else f"exit {code}"

    def _release(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()

    def _stdin(self) -> int:
        if self._child.stdin is None:
            raise TransportUnavailableError("the probe of NIXL peers has no input")
        return self._child.stdin.fileno()

    def _receive(self, seconds: float) -> bytes | None:
        """One frame, or None at the end of the file or of time."""
        if self._child.stdout is None:
            return None
        fd, until, data = self._child.stdout.fileno(), time.monotonic() + seconds, b""
        poll = select.poll()  # `select.select` ends at descriptor 1023
        poll.register(fd, select.POLLIN)
        while True:
            if len(data) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(data)
                if len(data) >= _LENGTH.size + length:
                    return data[_LENGTH.size :]
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return None
            if not (more := os.read(fd, 65536)):
                return None
            data += more


def main() -> None:
    """The child: until its input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Native code may print; frames go out on a descriptor that it does not know.
    out = os.dup(1)
    os.dup2(2, 1)
    agent = Agent(f"dwe-probe-{uuid.uuid4().hex}", Arena(1), load_bindings(sys.argv[1]))
    _write(out, _LENGTH.pack(0))
    while head := _read(0, _LENGTH.size):
        body = _read(0, min(_LENGTH.unpack(head)[0], _ASK.size + MAX_METADATA_BYTES))
        signal.alarm(_HANG_S)  # ends native code, too
        try:
            _try(agent, _ASK.unpack_from(body)[0], body[_ASK.size :])
        except TransferError as error:
            verdict = (_DEAD if error.reason == "peer_dead" else _REFUSED) + str(error).encode()
        else:
            verdict = _GOOD
        signal.alarm(0)
        _write(out, _LENGTH.pack(len(verdict)) + verdict)
    # Not the way round through native destructors: what they might stumble over is not ours.
    os._exit(0)


def _try(agent: Agent, address: int, metadata: bytes) -> None:
    # Never twice under one name: NIXL keeps what it took of metadata before it stumbled, and
    # would then refuse the real metadata of that name.
    name = f"tried-{uuid.uuid4().hex}"
    peer = agent.admit(name, b"", rename(metadata, name))
    if peer is None:
        raise PeerError("the peer is busy", reason="peer_dead")
    try:
        transfer = agent.read(peer, address, agent.arena.address, 1, "")
        try:
            while not agent.advance(transfer):
                time.sleep(0.0001)
        finally:
            while not agent.release(transfer):
                time.sleep(0.001)
    finally:
        agent.forget(peer)


def _read(fd: int, length: int) -> bytes:
    """As many bytes, or none at the end of the file."""
    data = b""
    while len(data) < length:
        if not (more := os.read(fd, length - len(data))):
            return b""
        data += more
    return data


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()

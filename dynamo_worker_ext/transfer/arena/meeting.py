"""How the two ends of an arena find each other, and what they say.

A sender listens on a unix socket in a directory of its user's own, beside the shared memory that
`card.host_identity` stands for: whoever has the same identity sees the same directory. The name
in a reference says which socket; the directory is never taken from the wire.

    receiver says   <B kind> <H part> <H slot> <Q generation>
    sender answers  <4s magic> <H part> <Q nbytes>, with the descriptor; 0 bytes if there is none
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import stat
import struct
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Final

from dynamo_worker_ext.errors import (
    InvalidTransferError,
    SegmentError,
    TransportUnavailableError,
)

RECORD: Final = struct.Struct("<BxHHxxQ")
PART: Final = struct.Struct("<4sHxxQ")
MAGIC: Final = b"DWA1"  # the digit is the version of all that is said here

_SOCKET: Final = re.compile(r"arena_[0-9a-f]{16}\Z")


class Kind(IntEnum):
    """What a receiver says."""

    WANT = 1  # a part
    HOLD = 2  # a slot: from now on it is looked at
    RELEASE = 3  # a slot: one hold less


def default_directory() -> Path:
    """Where this user's senders listen."""
    return Path(f"/dev/shm/dwe-{os.geteuid()}")  # noqa: S108 - see host_identity


class Listener:
    """A socket that receivers find by its name.

    Args:
        directory: made if it is not there; must be ours alone.

    Raises:
        TransportUnavailableError: the directory cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.name = f"arena_{secrets.token_hex(8)}"
        try:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise TransportUnavailableError(
                f"the arena transport needs a socket: {error.strerror}"
            ) from None
        self.socket.setblocking(False)
        try:
            with _Locked(directory, make=True) as where:
                _sweep(where)
                self.socket.bind(f"{where}/{self.name}")
                self.socket.listen(128)
        except (OSError, SegmentError) as error:
            self.socket.close()
            raise TransportUnavailableError(
                f"the arena transport needs the directory {directory}: {error}"
            ) from None

    def close(self) -> None:
        """Stop listening and leave nothing behind. A second call is a no-op."""
        if self.socket.fileno() < 0:
            return
        self.socket.close()
        with suppress(OSError, SegmentError), _Locked(self._directory, make=False) as where:
            Path(where, self.name).unlink()
            self._directory.rmdir()  # fails while others are in there


def connect(directory: Path, name: str) -> socket.socket:
    """Connect to a sender of our own user.

    Raises:
        InvalidTransferError: ``invalid_name``.
        SegmentError: ``segment_missing`` (it has ended, or runs elsewhere), ``segment_foreign``,
            ``segment_refused``.
        BlockingIOError: it does not come around to new connections now.
    """
    if not _SOCKET.match(name):
        raise InvalidTransferError(
            f"an arena's socket is called arena_ and 16 hex, got {name[:80]!r}",
            reason="invalid_name",
        )
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise _unreachable(name, error) from None
    try:
        connection.setblocking(False)
        fd = _open(directory)
        try:
            connection.connect(f"/proc/self/fd/{fd}/{name}")
        finally:
            os.close(fd)
        check_peer(connection)
    except BlockingIOError:
        connection.close()
        raise
    except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
        connection.close()
        raise gone(name) from None
    except OSError as error:
        connection.close()
        raise _unreachable(name, error) from None
    except BaseException:
        connection.close()
        raise
    return connection


def check_peer(connection: socket.socket) -> None:
    """Make sure that our own user is at the other end.

    Raises:
        SegmentError: ``segment_foreign``.
    """
    uid = peer_uid(connection)
    if uid != os.geteuid():
        raise SegmentError(
            f"user {uid} is at the other end of an arena's socket, expected {os.geteuid()}",
            reason="segment_foreign",
        )


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end, as the kernel says."""
    credentials = struct.Struct("3i")  # pid, uid, gid
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return int(credentials.unpack(raw)[1])


def gone(name: str) -> SegmentError:
    return SegmentError(
        f"arena {name} is not here: its sender has ended, or runs in another container",
        reason="segment_missing",
    )


def _unreachable(name: str, error: OSError) -> SegmentError:
    return SegmentError(
        f"arena {name} cannot be reached: {error.strerror}", reason="segment_refused"
    )


class _Locked:
    """The directory, while nobody else binds or removes sockets in it.

    Entering gives a path to it that is short enough for a socket's name, and that stays the same
    directory whatever becomes of its name.
    """

    def __init__(self, directory: Path, *, make: bool) -> None:
        self._directory, self._make = directory, make
        self._fd = -1

    def __enter__(self) -> str:
        while True:
            if self._make:
                with suppress(FileExistsError):
                    self._directory.mkdir(mode=0o700)
            try:
                self._fd = _open(self._directory)
            except FileNotFoundError:
                if self._make:  # removed by another sender that left
                    continue
                raise
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if os.fstat(self._fd).st_nlink or not self._make:
                return f"/proc/self/fd/{self._fd}"
            os.close(self._fd)  # removed while we waited

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _open(directory: Path) -> int:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    info = os.fstat(fd)
    if info.st_uid == os.geteuid() and not stat.S_IMODE(info.st_mode) & 0o077:
        return fd
    os.close(fd)
    raise SegmentError(
        f"{directory} must belong to user {os.geteuid()} and be closed to all others (mode 0700); "
        f"it belongs to {info.st_uid} and has mode {stat.S_IMODE(info.st_mode):04o}",
        reason="segment_foreign",
    )


def _sweep(where: str) -> None:
    """Remove the sockets of senders that were killed: nobody listens there any more."""
    for name in os.listdir(where):
        if not _SOCKET.match(name):
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)
            try:
                probe.connect(f"{where}/{name}")
            except ConnectionRefusedError:
                Path(where, name).unlink(missing_ok=True)
            except OSError:  # it lives, or is not ours to judge
                continue

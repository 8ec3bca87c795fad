"""NIXL's agent, its peers and one transfer at a time. Used by the one thread that owns it.

The bindings are used below ``nixl._api``, because that fixes the delay of the progress thread at
0, which is a core burnt for as long as the process lives (nixl 1.4.1 to 1.5.1).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, Final

from dynamo_worker_ext.errors import PeerError, TransportUnavailableError
from dynamo_worker_ext.transfer.nixl_arena import Arena

#: Longest sleep of the native progress thread. It wakes at once when something arrives; this is
#: for what it would not notice, and costs an idle process 0.5 % of a core.
_PROGRESS_US: Final = 10_000

#: Whose bindings are used here, for messages; see above.
VERSIONS: Final = "1.4.1 to 1.5.1"

#: Peers that are kept loaded. The one unused for longest goes first.
MAX_PEERS: Final = 64


def load_bindings(path: str | None = None) -> Any:
    """NIXL's native module.

    Args:
        path: of the module's file, to load it without the package around it, which imports torch:
            100 MB that a process which only needs this can do without.

    Raises:
        TransportUnavailableError: nixl cannot be loaded.
    """
    try:
        if path is None:
            return import_module("nixl._bindings")
        spec = spec_from_file_location("_bindings", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no module")
        native = module_from_spec(spec)
        spec.loader.exec_module(native)
    except ImportError as error:
        raise TransportUnavailableError(
            f"the nixl transport needs the packages nixl and nixl-cu12 or -cu13: {error}"
        ) from None
    return native


class Peer:
    """One loaded peer.

    Attributes:
        name: of its agent.
        digest: of the metadata that is loaded for it.
        reads: transfers from it that are not over.
    """

    __slots__ = ("digest", "name", "reads")

    def __init__(self, name: str, digest: bytes) -> None:
        self.name = name
        self.digest = digest
        self.reads = 0


class Transfer:
    """One READ that was posted.

    Attributes:
        peer: from whom.
        posted: when, by the monotonic clock, in seconds.
        done: whether it has ended well.
        failed: whether it has failed; what it wrote to may still be in use.
    """

    __slots__ = ("done", "failed", "handle", "peer", "posted")

    def __init__(self, peer: Peer, handle: int) -> None:
        self.peer = peer
        self.handle = handle
        self.posted = time.monotonic()
        self.done = False
        self.failed = False


class Agent:
    """An agent with UCX and one arena.

    Args:
        name: unique among all that meet.
        arena: what is registered; kept by the agent.
        native: what `load_bindings` gives.

    Raises:
        TransportUnavailableError: nixl does not start here.
    """

    def __init__(self, name: str, arena: Arena, native: Any) -> None:
        self._native = native
        #: Everything that the bindings raise of their own; they have no common base.
        self.errors: tuple[type[Exception], ...] = tuple(
            value
            for name, value in vars(native).items()
            if name.startswith("nixl") and name.endswith("Error")
        )
        # What they may raise besides: they decode the names that peers give without care.
        careless: tuple[type[Exception], ...] = (*self.errors, RuntimeError, ValueError)
        self._careless = careless
        self.name = name
        self.arena = arena
        self._peers: OrderedDict[str, Peer] = OrderedDict()  # the last used at the end
        #: Of the loaded peers. Replaced, never changed: other threads look at it.
        self.digests: frozenset[bytes] = frozenset()
        try:
            config = native.nixlAgentConfig(
                True, False, 0, native.NIXL_THREAD_SYNC_NONE, 1, _PROGRESS_US, 100_000, False
            )
            self._agent = native.nixlAgent(name, config)
            backend = self._agent.createBackend("UCX", {})
            whole = [(arena.address, arena.nbytes, 0, "")]
            self._registered = native.nixlRegDList(native.DRAM_SEG, whole)
            self._agent.registerMem(self._registered, [backend])
            #: What a peer needs to reach this agent.
            self.metadata: bytes = self._agent.getLocalMD()
        except self._careless as error:
            raise TransportUnavailableError(
                f"the nixl transport does not start with UCX here: {_short(error)}"
            ) from None

    def admit(self, name: str, digest: bytes, metadata: bytes) -> Peer | None:
        """Find a peer, or load it.

        Returns:
            The peer, or None while transfers run that know it by other metadata.

        Raises:
            PeerError: ``peer_refused`` if NIXL does not take the metadata.
        """
        peer = self._peers.get(name)
        if peer is not None and peer.digest == digest:
            self._peers.move_to_end(name)
            return peer
        if peer is not None:
            if peer.reads:
                return None
            self.forget(peer)
        if name == self.name:
            raise PeerError(f"the peer has our own name, {name}", reason="peer_refused")
        for other in [p for p in self._peers.values() if not p.reads]:
            if len(self._peers) < MAX_PEERS:
                break
            self.forget(other)
        try:
            loaded = self._agent.loadRemoteMD(metadata)
            if loaded != name.encode():
                raise PeerError(f"metadata of {name} is another agent's", reason="peer_refused")
            self._agent.makeConnection(name, [])
        except self._careless as error:
            raise PeerError(
                f"NIXL does not take the metadata of {name}: {_short(error)}", reason="peer_refused"
            ) from None
        self._peers[name] = peer = Peer(name, digest)
        self.digests = frozenset(p.digest for p in self._peers.values())
        return peer

    def forget(self, peer: Peer) -> None:
        """Disconnect from a peer; it has to be admitted again."""
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            self.digests = frozenset(p.digest for p in self._peers.values())
            with suppress(*self.errors):  # a peer that is not there is what we want
                self._agent.invalidateRemoteMD(peer.name)

    def read(self, peer: Peer, remote: int, local: int, nbytes: int, key: str) -> Transfer:
        """Post a READ, and notify the peer with `key` when it is over if that is not empty.

        On one host this often takes as long as the copy, and lets other threads run meanwhile.

        Raises:
            PeerError: ``peer_refused`` if the peer has nothing there, ``peer_dead``.
        """
        native = self._native
        try:
            handle = self._agent.createXferReq(
                native.NIXL_READ,
                native.nixlXferDList(native.DRAM_SEG, [(local, nbytes, 0)]),
                native.nixlXferDList(native.DRAM_SEG, [(remote, nbytes, 0)]),
                peer.name,
                key,
                [],
            )
        except self.errors as error:
            raise PeerError(
                f"{peer.name} offers no {nbytes} bytes at that address: {_short(error)}",
                reason="peer_refused",
            ) from None
        peer.reads += 1
        transfer = Transfer(peer, handle)
        # An error does not say that it is over: the caller finds out by `advance` and `release`.
        with suppress(*self.errors):
            transfer.done = self._agent.postXferReq(handle, key) == native.NIXL_SUCCESS
        return transfer

    def advance(self, transfer: Transfer) -> bool:
        """Whether a transfer has ended well by now.

        Raises:
            PeerError: ``peer_dead``: it failed. Its memory is in use until `release` is True.
        """
        if not transfer.done:
            try:
                status = self._agent.getXferStatus(transfer.handle)
            except self.errors as error:
                raise _gone(transfer.peer, _short(error)) from None
            if status not in (self._native.NIXL_SUCCESS, self._native.NIXL_IN_PROG):
                raise _gone(transfer.peer, str(status))
            transfer.done = bool(status == self._native.NIXL_SUCCESS)
        return transfer.done

    def release(self, transfer: Transfer) -> bool:
        """Let go of a transfer that has ended; False if NIXL is not yet sure of that."""
        try:
            self._agent.releaseXferReq(transfer.handle)
        except self.errors:
            return False
        transfer.peer.reads -= 1
        return True

    def notify(self, name: str, key: str) -> None:
        """Tell a loaded peer that nothing will be read. Best effort: a dead one hears nothing."""
        with suppress(*self.errors):
            self._agent.genNotif(name, key, [])

    def notifications(self) -> list[bytes]:
        """What peers have sent since the last call."""
        with suppress(*self._careless):
            return [key for keys in self._agent.getNotifs({}, []).values() for key in keys]
        return []

    def close(self) -> None:
        """End it. No transfer may be running."""
        for peer in list(self._peers.values()):
            self.forget(peer)
        with suppress(*self.errors):
            self._agent.deregisterMem(self._registered, [])
        del self._agent


def _gone(peer: Peer, why: str) -> PeerError:
    return PeerError(f"{peer.name} is gone or cannot be reached: {why}", reason="peer_dead")


def _short(error: Exception) -> str:
    return str(error)[:200]

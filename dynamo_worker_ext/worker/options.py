"""Our own command-line options, the same for both engines."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from dynamo.common.configuration.utils import add_argument, add_negatable_bool_argument

from dynamo_worker_ext import transfer
from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.hashing import HashMode


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Our own command-line options.

    Attributes:
        transports: what pre-processed media is taken over, in order of preference.
        all_transports: whether each of them was asked for by name, so that one that cannot be had
            is an error.
        max_item_bytes: largest payload of one media item.
        transfer_timeout_s: seconds for one request's payloads to arrive.
        hash_mode: how media is identified to the router; None for what this Dynamo expects.
        media_cache_mb: size of the cache of decoded raw images, in MB.
        drain_timeout_s: seconds that requests in flight get after SIGTERM.
        require_patches: serve only with every patch that the engine's version has.
        embedding_cache_bytes: of an encode worker, its cache in each transport's memory.
        embedding_lease_s: of an encode worker, seconds that an embedding can at least be read
            after it was handed out.
    """

    transports: tuple[str, ...]
    all_transports: bool
    max_item_bytes: int
    transfer_timeout_s: float
    hash_mode: HashMode | None
    media_cache_mb: int
    drain_timeout_s: float
    require_patches: bool = False
    embedding_cache_bytes: int = 256 << 20
    embedding_lease_s: float = 60.0


def add_worker_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add our own options to a worker's parser; returns their group, for an engine's own."""
    group = parser.add_argument_group("dynamo-worker-ext Options")
    add_argument(
        group,
        flag_name="--mm-transfer",
        env_var="DYN_MM_TRANSFER",
        default="auto",
        help="Transports over which pre-processed media and embeddings are accepted, and over "
        "which an encode worker offers its own: a comma-separated list in "
        f"order of preference from {', '.join(transfer.usable())}; 'auto' for all of them, "
        "'off' for none (the frontend then has to send URLs).",
    )
    add_argument(
        group,
        flag_name="--mm-max-item-mb",
        env_var="DYN_MM_MAX_ITEM_MB",
        default=256,
        arg_type=int,
        help="Largest pre-processed media item that is accepted, in MB.",
    )
    add_argument(
        group,
        flag_name="--mm-transfer-timeout",
        env_var="DYN_MM_TRANSFER_TIMEOUT",
        default=10.0,
        arg_type=float,
        help="Seconds for the pre-processed media of one request to arrive.",
    )
    add_argument(
        group,
        flag_name="--mm-hash-mode",
        env_var="DYN_MM_HASH_MODE",
        default="auto",
        choices=["auto", *(mode.value for mode in HashMode)],
        help="How media is identified to the router. 'auto' is pad_value, which Dynamo expects "
        "since 1.3; block_mm_infos is for Dynamo up to 1.2.",
    )
    add_argument(
        group,
        flag_name="--mm-media-cache-mb",
        env_var="DYN_MM_MEDIA_CACHE_MB",
        default=64,
        arg_type=int,
        help="Memory for images decoded from data URIs, in MB; 0 for none.",
    )
    add_argument(
        group,
        flag_name="--drain-timeout",
        env_var="DYN_WORKER_DRAIN_TIMEOUT",
        default=60.0,
        arg_type=float,
        help="Seconds that requests in flight get to finish after SIGTERM.",
    )
    add_negatable_bool_argument(
        group,
        flag_name="--require-patches",
        env_var="DYN_REQUIRE_PATCHES",
        default=False,
        help="Do not serve unless the engine has every patch that its version needs "
        "(python -m dynamo_worker_ext.patching check).",
    )
    add_argument(
        group,
        flag_name="--embedding-cache-mb",
        env_var="DYN_EMBEDDING_CACHE_MB",
        default=256,
        arg_type=int,
        help="Encode workers: embeddings that are kept, so that a repeated image is not encoded "
        "again, in MB of each transport's memory; 0 for none.",
    )
    add_argument(
        group,
        flag_name="--embedding-lease",
        env_var="DYN_EMBEDDING_LEASE",
        default=60.0,
        arg_type=float,
        help="Encode workers: seconds that an embedding can be read, at least, after a request "
        "was told where it lies. Should exceed the time that requests wait for prefill.",
    )
    return group


def worker_options(args: argparse.Namespace) -> WorkerOptions:
    """Read and check what `add_worker_arguments` added.

    Raises:
        StartupError: a value is out of range; the message names the flag.
    """
    for flag, value in (
        ("--mm-max-item-mb", args.mm_max_item_mb),
        ("--mm-transfer-timeout", args.mm_transfer_timeout),
        ("--embedding-lease", args.embedding_lease),
    ):
        if not value > 0:
            raise StartupError(f"{flag} is {value}; it must be above 0")
    for flag, value in (
        ("--mm-media-cache-mb", args.mm_media_cache_mb),
        ("--drain-timeout", args.drain_timeout),
        ("--embedding-cache-mb", args.embedding_cache_mb),
    ):
        check_not_negative(flag, value)
    return WorkerOptions(
        transports=_transports(args.mm_transfer),
        all_transports=args.mm_transfer != "auto",
        max_item_bytes=args.mm_max_item_mb * 1024 * 1024,
        transfer_timeout_s=args.mm_transfer_timeout,
        hash_mode=None if args.mm_hash_mode == "auto" else HashMode(args.mm_hash_mode),
        media_cache_mb=args.mm_media_cache_mb,
        drain_timeout_s=args.drain_timeout,
        require_patches=args.require_patches,
        embedding_cache_bytes=args.embedding_cache_mb << 20,
        embedding_lease_s=args.embedding_lease,
    )


def check_not_negative(flag: str, value: float) -> None:
    """Refuse a value below 0, or none at all (NaN).

    Raises:
        StartupError: the message names the flag.
    """
    if not value >= 0:
        raise StartupError(f"{flag} is {value}; it must not be negative")


def _transports(value: str) -> tuple[str, ...]:
    known = transfer.usable()
    if value == "auto":
        return known
    if value == "off":
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise StartupError(
            f"--mm-transfer {value!r}: this worker takes {', '.join(known)}, 'auto' or 'off'"
        )
    return names

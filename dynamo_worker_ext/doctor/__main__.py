"""``python -m dynamo_worker_ext.doctor``: what is wrong here, and what to do about it."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Final

from dynamo_worker_ext import transfer
from dynamo_worker_ext.card import host_identity
from dynamo_worker_ext.doctor.deployment import deployment
from dynamo_worker_ext.doctor.discovery import SeenWorker, read_cards
from dynamo_worker_ext.doctor.environment import environment
from dynamo_worker_ext.doctor.findings import Finding, as_json, as_text, exit_status
from dynamo_worker_ext.doctor.probe import probe
from dynamo_worker_ext.errors import StartupError

PROG: Final = "python -m dynamo_worker_ext.doctor"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Look at this machine, and at the workers that discovery knows.",
        epilog="exit status: 0 nothing is wrong (there may be notes), 1 something is, 2 wrong "
        "usage. Run it where the frontend runs, with its DYN_* variables.",
    )
    parser.add_argument(
        "--discovery",
        nargs="?",
        const="",
        metavar="BACKEND",
        help="look at the workers' cards; Dynamo's name of the backend: file, etcd, kubernetes "
        "(default: DYN_DISCOVERY_BACKEND)",
    )
    parser.add_argument(
        "--endpoint",
        default="dynamo.backend.generate",
        metavar="NAMESPACE.COMPONENT.ENDPOINT",
        help="whose workers (%(default)s)",
    )
    parser.add_argument(
        "--probe",
        metavar="URL",
        help="send one tiny image through the frontend at URL; with --discovery also says what "
        "the worker did with it",
    )
    parser.add_argument("--model", help="what --probe asks (default: the first that is served)")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for an answer (30)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.endpoint.count(".") != 2:
        parser.error(f"--endpoint {args.endpoint!r} is not NAMESPACE.COMPONENT.ENDPOINT")
    if not args.timeout > 0:
        parser.error("--timeout must be above 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `--help`."""
    args = parse_args(argv)
    findings = environment()
    workers: list[SeenWorker] = []
    if args.discovery is not None:
        backend = args.discovery or os.environ.get("DYN_DISCOVERY_BACKEND", "etcd")
        try:
            workers = asyncio.run(read_cards(backend, args.endpoint, min(args.timeout, 5.0)))
        except StartupError as error:
            findings.append(
                Finding.problem("workers", str(error), "run this in the frontend's environment")
            )
        else:
            findings += deployment(workers, host_id=host_identity(), usable=transfer.usable())
    if args.probe is not None:
        urls = [one.system_url for one in workers if one.system_url]
        findings += probe(args.probe, model=args.model, system_urls=urls, timeout=args.timeout)
    print(as_json(findings) if args.json else as_text(findings))
    return exit_status(findings)


if __name__ == "__main__":
    sys.exit(main())

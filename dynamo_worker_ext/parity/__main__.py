"""``python -m dynamo_worker_ext.parity``: is routing by images exact for this model?

Starts the engine in this process, sends prompts with and without images, and compares the blocks
that a frontend would hash with those that the worker publishes. No frontend, no discovery.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import traceback
from collections.abc import Sequence

from dynamo_worker_ext.errors import WorkerExtError
from dynamo_worker_ext.hashing import HashMode

PROG = "python -m dynamo_worker_ext.parity"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description=__doc__.split("\n\n", 1)[1],
        epilog="exit status: 0 exact, 1 something differs, 2 it could not be checked. What comes "
        "after -- goes to the engine.",
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="the model's folder")
    parser.add_argument("--engine", required=True, choices=["vllm", "sglang"])
    parser.add_argument("--images", type=int, default=3, metavar="N", help="most in one prompt (3)")
    parser.add_argument(
        "--mode",
        type=HashMode,
        default=HashMode.PAD_VALUE,
        choices=list(HashMode),
        help="how media is identified (pad_value)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("engine_args", nargs="*", metavar="ENGINE-ARGUMENT", help="after --")
    args = parser.parse_args(argv)
    if args.images < 0:
        parser.error("--images must not be negative")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `--help`."""
    args = parse_args(argv)
    try:
        return asyncio.run(_run(args))
    except WorkerExtError as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"parity: {error}; run this in {args.engine}'s environment", file=sys.stderr)
        return 2
    except Exception:  # whatever an engine raises, 1 would say that something differs
        traceback.print_exc()
        return 2


async def _run(args: argparse.Namespace) -> int:
    from dynamo_worker_ext.parity.engine import start_engine
    from dynamo_worker_ext.parity.run import check

    engine = await start_engine(args.engine, args.model, args.engine_args)
    try:
        report = await check(engine, args.engine, args.model, images=args.images, mode=args.mode)
    finally:
        await engine.close()
    if args.json:
        document = {**dataclasses.asdict(report), "exact": report.is_exact}
        print(json.dumps(document, indent=2))
        return 0 if report.is_exact else 1
    print(f"{report.engine}, {report.mode.value}, blocks of {report.block_size} tokens")
    if report.files:
        print(f"the model's files alone are not exact: {report.files}")
    for one in report.verdicts:
        print(f"{one.name:24}{one.tokens:6} tokens{one.blocks:5} blocks  ", end="")
        print("exact" if one.is_exact else "DIFFERS")
        for side, difference in (("processor", one.by_processor), ("files", one.by_files)):
            if difference:
                print(f"    by the {side}: {difference}")
    print(
        f"{'exact' if report.is_exact else 'not exact'}, {report.exact} of {len(report.verdicts)}"
    )
    return 0 if report.is_exact else 1


if __name__ == "__main__":
    sys.exit(main())

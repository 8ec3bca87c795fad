"""`python -m dynamo_worker_ext.tinyvlm`: make a tiny random model in a directory."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dynamo_worker_ext.tinyvlm import FAMILIES, make


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `--help`.

    Returns:
        0, or 1 if the model could not be made. A wrong command line exits with 2.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.list:
        width = max(map(len, FAMILIES))
        for family in FAMILIES.values():
            print(f"{family.name:{width}}  {family.summary}")
        return 0
    if args.family is None or args.out is None:
        parser.error("--family and --out are required (or --list)")
    started = time.monotonic()
    try:
        make(FAMILIES[args.family], args.out, seed=args.seed, force=args.force)
    except ImportError as error:
        print(f"tinyvlm: {error}; run this in an engine's environment", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"tinyvlm: {error}", file=sys.stderr)
        return 1
    print(f"made {args.family} in {args.out} ({time.monotonic() - started:.1f} s)")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dynamo-worker-ext-tinyvlm",
        description="Make a tiny random model with the layout, tokenizer, chat template and "
        "processors of its real family, for demos and tests.",
    )
    parser.add_argument("--family", choices=list(FAMILIES), help="what to make")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to make it")
    parser.add_argument("--seed", type=int, default=0, help="chooses the weights (default: 0)")
    parser.add_argument(
        "--force", action="store_true", help="replace DIR even if it was not made by this command"
    )
    parser.add_argument("--list", action="store_true", help="print the families and exit")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""``python -m dynamo_worker_ext.bench transfer``: what moving media costs on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dynamo_worker_ext import transfer as transports
from dynamo_worker_ext.bench.transfer import UPSTREAM, Measurement, Row
from dynamo_worker_ext.errors import WorkerExtError

_COLUMNS = (
    ("way", "{:<14}"), ("megabytes", "{:>7g}"), ("items", "{:>6}"), ("p50_ms", "{:>9.3f}"),
    ("p99_ms", "{:>9.3f}"), ("gb_per_s", "{:>9.2f}"), ("times_memcpy", "{:>13.1f}"),
    ("page_faults", "{:>12.0f}"), ("idle_cpu", "{:>9.1%}"),
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(prog="python -m dynamo_worker_ext.bench", description=__doc__)
    commands = root.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "transfer",
        help="transports between two processes of this machine",
        description="Offers, receives and copies out items between two processes, and prints "
        "medians of one run. Ways take turns, so that what else the machine does hits all alike.",
    )
    command.add_argument(
        "--transports", default=",".join(transports.usable()),
        help="comma-separated (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--sizes", type=float, nargs="+", default=[1.0, 4.0, 25.0], metavar="MB",
        help="of one item (default: 1 4 25)",
    )  # fmt: skip
    command.add_argument("--items", type=int, default=1, help="in one offer (default: 1)")
    command.add_argument("--rounds", type=int, default=50, help="a size (default: 50)")
    command.add_argument(
        "--vs-upstream", action="store_true", help="beside Dynamo's own classes, in the same run"
    )
    command.add_argument(
        "--stall", type=float, metavar="MB",
        help="also the longest stall of the receiver's event loop while so much arrives",
    )  # fmt: skip
    command.add_argument(
        "--endure", type=int, metavar="N",
        help="also what N items of 1 MB, 16 in flight, leave behind after the first tenth",
    )  # fmt: skip
    command.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw them here, as PNG (needs matplotlib)"
    )
    return root


def table(rows: Sequence[Row]) -> str:
    """What is printed: a line a way and size, and how often ours is faster than upstream's."""
    lines = ["  ".join(_padded(name, form) for name, form in _COLUMNS)]
    medians = {(row.way, row.megabytes): median(row.totals()) for row in rows}
    for row in rows:
        values = row.to_json()
        line = "  ".join(form.format(values[name]) for name, form in _COLUMNS)
        theirs = medians.get((UPSTREAM.get(row.way, ""), row.megabytes))
        if theirs is not None:
            line += f"  {theirs / medians[row.way, row.megabytes]:.1f} x faster than upstream's"
        lines.append(line)
    return "\n".join(lines)


def _padded(name: str, form: str) -> str:
    width = len(form.format("" if "<" in form else 0))
    return name.ljust(width) if "<" in form else name.rjust(width)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Multiples of a memory copy over the size of an item, a line a way.

    Raises:
        WorkerExtError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise WorkerExtError(
            "--plot needs matplotlib: pip install 'dynamo-worker-ext[bench]'"
        ) from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(
        xscale="log", yscale="log", xlabel="MB an item", ylabel="times a memory copy, median"
    )
    for way in dict.fromkeys(row.way for row in rows):
        points = [row.to_json() for row in rows if row.way == way]
        xs, ys = [p["megabytes"] for p in points], [p["times_memcpy"] for p in points]
        axes.plot(xs, ys, marker="o", label=way)
    axes.legend()
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.savefig(path, format="png", dpi=150)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print.

    Returns:
        What ``--json`` writes.
    """
    names = [name for name in args.transports.split(",") if name]
    for name in names:
        if name not in UPSTREAM:
            raise WorkerExtError(f"--transports {name}: there is {', '.join(UPSTREAM)}")
    if min([*args.sizes, args.items, args.rounds]) <= 0 or not names:
        raise WorkerExtError("sizes, items and rounds are above 0, and there is a transport")
    if args.vs_upstream:
        names += dict.fromkeys(UPSTREAM[name] for name in names)
    rows: list[Row] = []
    result: dict[str, Any] = {}
    with Measurement(names) as measurement:
        for megabytes in args.sizes:
            rows += measurement.compare(megabytes, args.items, args.rounds)
        print(table(rows))
        result["transfer"] = [row.to_json() for row in rows]
        if args.stall:
            result["stall_ms"] = measurement.stalls(args.stall, max(3, args.rounds // 4))
            for way, longest in result["stall_ms"].items():
                print(
                    f"{way}: the event loop was late by {median(longest):.2f} ms at most while "
                    f"{args.stall:g} MB arrived; worst {max(longest):.2f} ms"
                )
        if args.endure:
            result["growth"] = measurement.growth(args.endure)
            for way, grown in result["growth"].items():
                print(f"{way}: {args.endure} items left behind {grown}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot is not None:
        plot(rows, args.plot)
    return result


def main() -> None:
    args = parser().parse_args()
    try:
        run(args)
    except WorkerExtError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

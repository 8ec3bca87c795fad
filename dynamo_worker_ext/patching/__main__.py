"""`python -m dynamo_worker_ext.patching`: look at, apply and revert engine patches; see --help."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from dynamo_worker_ext.errors import EngineMissingError, PatchingError
from dynamo_worker_ext.patching import apply, engines
from dynamo_worker_ext.patching.manifest import ENGINES, EngineName, Patch, manifests
from dynamo_worker_ext.patching.state import EngineStatus, State
from dynamo_worker_ext.patching.verify import TIMEOUT_S, Proof, verify

GOOD: Final = 0
NOT_APPLIED: Final = 1
REFUSED: Final = 3
NO_ENGINE: Final = 4
DISPROVED: Final = 5

_DESCRIPTION = """\
Make a pinned engine able to do what a worker of this package needs, or say exactly why it is not.

commands:
  list     the versions and patches that are known
  check    the state of an installed engine's patches; writes nothing
  apply    apply all patches of the installed version, or none
  revert   give every patched file the bytes that it was shipped with
  verify   check, then prove by behaviour what is applied or upstream; imports the engine in a
           process of its own, and needs no GPU and no model
"""
_EPILOG = """\
states:
  applied           the files are exactly the patched ones
  already-upstream  this version has it
  not-needed        this version, or this package's worker, does not need it
  applicable        the files are exactly those that the patch is for; it is not applied
  refused           anything else: an unknown version, a changed file, a tree that is partly patched

exit status (of several engines, the highest):
  0  applied, already-upstream or not-needed; after revert: reverted
  1  applicable (check, verify)
  2  wrong usage
  3  refused, a tree that cannot be written, or another run at work: nothing was changed
  4  no such engine there
  5  verify: a patch does not do what it is for
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `--help`.

    Returns:
        The exit status. A wrong command line exits with 2.
    """
    args = _parser().parse_args(argv)
    chosen: list[EngineName] = args.engine or []
    try:
        if args.command == "list":
            _list(chosen, as_json=args.json)
            return GOOD
        found = engines.find_all(chosen, args.site_packages)
        results = [_run(args.command, one, args.timeout) for one in found]
    except PatchingError as error:
        if args.json:
            print(json.dumps({"error": str(error)}))
        print(f"patching: {error}", file=sys.stderr)
        return NO_ENGINE if isinstance(error, EngineMissingError) else REFUSED
    if args.json:
        print(json.dumps([_as_json(*result) for result in results], indent=2))
    else:
        for result in results:
            _print(*result)
    return max(_exit_status(args.command, *result) for result in results)


def _run(
    command: str, installation: engines.Installation, timeout_s: float
) -> tuple[EngineStatus, list[Proof]]:
    act = {"apply": apply.apply, "revert": apply.revert}.get(command, apply.check)
    status = act(installation)
    proofs = verify(status, timeout_s) if command == "verify" and status.state.is_good else []
    return status, proofs


def _exit_status(command: str, status: EngineStatus, proofs: list[Proof]) -> int:
    if status.state is State.REFUSED:
        return REFUSED
    if status.state is State.APPLICABLE:
        return GOOD if command == "revert" else NOT_APPLIED
    return DISPROVED if any(proof.fault for proof in proofs) else GOOD


def _as_json(status: EngineStatus, proofs: list[Proof]) -> dict[str, Any]:
    data = status.to_json()
    if proofs:
        data["proofs"] = [asdict(one) for one in proofs]
    return data


def _print(status: EngineStatus, proofs: list[Proof]) -> None:
    print(f"{status.installation}: {status.state}")
    for note in status.notes:
        print(f"  note: {note}")
    for one in status.patches:
        print(f"  {one.patch.name}: {one.state}")
        if one.reason and one.state is not State.REFUSED:
            _wrapped(one.reason)
    if status.refusal:
        print("  refused:")
        _wrapped(status.refusal)
    for proof in proofs:
        print(f"  {proof.patch}, check {proof.check}: {'failed' if proof.fault else 'passed'}")
        if proof.fault:
            print(textwrap.indent(proof.fault, "    "))


def _wrapped(text: str) -> None:
    print(
        textwrap.fill(" ".join(text.split()), 100, initial_indent="    ", subsequent_indent="    ")
    )


def _list(chosen: Sequence[EngineName], *, as_json: bool) -> None:
    known = [one for one in manifests() if not chosen or one.engine in chosen]
    if as_json:
        print(json.dumps([one.model_dump(mode="json") for one in known], indent=2))
        return
    for manifest in known:
        print(f"{manifest.engine} {', '.join(manifest.versions)}")
        for patch in manifest.patches:
            print(f"  {patch.name}: {patch.state}")
            _describe(patch)


def _describe(patch: Patch) -> None:
    _wrapped(patch.why)
    if patch.changes:
        _wrapped(f"changes: {patch.changes}")
    for file in patch.files:
        print(f"    {file.path}")
    if patch.upstream:
        print(f"    upstream: {' '.join(patch.upstream)}")
    if patch.files:
        print(f"    first version without need: {patch.not_needed_since or 'none yet'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dynamo-worker-ext-patching",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["list", "check", "apply", "revert", "verify"])
    parser.add_argument(
        "--engine", choices=ENGINES, action="append", help="default: each that is there"
    )
    parser.add_argument(
        "--site-packages",
        type=Path,
        metavar="DIR",
        help="the directory that holds the engine's package and its .dist-info, such as an "
        "unpacked wheel (default: what this Python would import)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"for verify (default: {TIMEOUT_S:g})",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

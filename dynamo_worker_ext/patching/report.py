"""What a worker says about the patches of the engine that it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_worker_ext.errors import PatchingError
from dynamo_worker_ext.metrics import Metrics
from dynamo_worker_ext.patching import engines
from dynamo_worker_ext.patching.apply import check
from dynamo_worker_ext.patching.manifest import EngineName
from dynamo_worker_ext.patching.state import State


@dataclass(frozen=True, slots=True)
class PatchReport:
    """The patches of the engine that this Python imports.

    Attributes:
        engine: which one.
        version: of its distribution; empty if it was not found.
        states: of each patch that its version has, by name.
        refusal: why its patches can neither be trusted nor applied; empty if they can.
    """

    engine: EngineName
    version: str
    states: Mapping[str, State]
    refusal: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Patches that are in effect, for the card."""
        return tuple(name for name, state in self.states.items() if state is State.APPLIED)

    @property
    def missing(self) -> tuple[str, ...]:
        """Patches that the engine needs and does not have, as far as is known."""
        return tuple(name for name, state in self.states.items() if not state.is_good)

    @property
    def is_complete(self) -> bool:
        """Whether the engine has all that it needs."""
        return not self.refusal and not self.missing

    def describe(self) -> list[str]:
        """One line a patch, and one for what is wrong with all of them."""
        said = f"{self.engine} {self.version}".rstrip()
        lines = [f"{said}: patch {name}: {state}" for name, state in self.states.items()]
        if self.refusal:
            lines.append(f"{said}: patches refused: {self.refusal}")
        elif self.missing:
            lines.append(
                f"{said}: without {', '.join(self.missing)}; "
                f"python -m dynamo_worker_ext.patching apply --engine {self.engine}"
            )
        return lines

    def show(self, metrics: Metrics) -> None:
        """Set the series of each patch."""
        for name, state in self.states.items():
            metrics.engine_patch.labels(name, state.value).set(1)


def installed(engine: EngineName) -> PatchReport:
    """Look at the engine that this Python imports. Imports nothing, writes nothing, never raises
    for what it finds: that is in the report.
    """
    version = ""
    try:
        found = engines.find(engine)
        version = found.version
        status = check(found)
    except (PatchingError, OSError) as error:
        return PatchReport(engine, version, {}, str(error))
    states = {one.patch.name: one.state for one in status.patches}
    return PatchReport(engine, version, states, status.refusal)

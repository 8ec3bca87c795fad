"""The samples of one ``/metrics`` page, or of several added up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class Sample(NamedTuple):
    """One series: its name, its labels in order, and its value."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


@dataclass(frozen=True)
class Snapshot:
    """What processes counted up to one moment; subtract an earlier one to see what happened."""

    samples: tuple[Sample, ...] = ()

    @classmethod
    def parse(cls, *pages: str) -> Snapshot:
        return cls(
            tuple(
                Sample(one.name, tuple(sorted(one.labels.items())), one.value)
                for page in pages
                for family in text_string_to_metric_families(page)
                for one in family.samples
            )
        )

    def __sub__(self, before: Snapshot) -> Snapshot:
        known = {(name, labels): value for name, labels, value in before.samples}
        return Snapshot(
            tuple(
                Sample(name, labels, value - known.get((name, labels), 0.0))
                for name, labels, value in self.samples
            )
        )

    def named(self, name: str, **labels: str) -> Iterable[Sample]:
        """Samples of one name that have all of these labels."""
        want = labels.items()
        return (s for s in self.samples if s.name == name and want <= dict(s.labels).items())

    def has(self, name: str, **labels: str) -> bool:
        """Whether there is such a sample at all, be it 0."""
        return any(True for _ in self.named(name, **labels))

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of one name that have these labels; 0 where there is none."""
        return sum(sample.value for sample in self.named(name, **labels))

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The same sum for each value of one label, without those that are 0."""
        result: dict[str, float] = {}
        for sample in self.named(name, **labels):
            key = dict(sample.labels).get(label, "")
            result[key] = result.get(key, 0.0) + sample.value
        return {key: value for key, value in result.items() if value}

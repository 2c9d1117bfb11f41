"""What happened to rows on their way into a run: `Counts`, and for a mixture those of each set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from comb.documents.datasets import Counts


@dataclass
class DataCounts(Counts):
    """`Counts` that can say more: what was changed without a loss, and for a mixture what each set did.

    Args:
        noted: what else happened, how often.
        repeated: examples that come once more than they were read.
        sets: counts of every set of a mixture, by name; `dropped` and `truncated` here are what happened afterwards.
    """

    noted: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    sets: dict[str, DataCounts] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Counts) -> DataCounts:
        """These counts, to be counted on with."""
        return cls(counts.read, Counter(counts.dropped), Counter(counts.truncated))

    @classmethod
    def of_sets(cls, sets: Mapping[str, DataCounts]) -> DataCounts:
        """The sum of a mixture."""
        return cls(read=sum(counts.read for counts in sets.values()), sets=dict(sets))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> DataCounts:
        """What `to_dict` gave, for one set."""
        return cls(
            content["read"],
            Counter(content["dropped"]),
            Counter(content["truncated"]),
            Counter(content.get("noted", {})),
            content.get("repeated", 0),
        )

    @property
    def kept(self) -> int:
        """Examples there are now."""
        if self.sets:
            return sum(counts.kept for counts in self.sets.values()) - sum(self.dropped.values())
        return super().kept + self.repeated

    def note(self, what: str, n: int = 1) -> None:
        """Counts `n` of something that is no loss."""
        if n:
            self.noted[what] += n

    def take(self, size: int, number: int) -> None:
        """Counts what the shares of a mixture leave out of this set, or repeat."""
        self.drop("over the share of the mixture", max(0, size - number))
        self.repeated += max(0, number - size)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        content = super().to_dict()
        for name, counts in self.sets.items():
            for kind in ("dropped", "truncated"):
                content[kind] |= {f"{name}: {reason}": n for reason, n in getattr(counts, kind).items()}
        if self.noted:
            content["noted"] = dict(self.noted)
        if self.repeated:
            content["repeated"] = self.repeated
        if self.sets:
            content["sets"] = {name: counts.to_dict() for name, counts in self.sets.items()}
        return content

    def __str__(self) -> str:
        if self.sets:
            lines = [
                f"{self.kept} examples of {self.read} rows",
                *(f"{name}: {own}" for name, own in self.sets.items()),
            ]
            lines += [f"dropped: {n} {reason}" for reason, n in sorted(self.dropped.items())]
            return "\n  ".join(lines)
        rows = Counts(self.read, self.dropped, self.truncated)
        parts = [str(rows), *(f"{n} {what}" for what, n in sorted(self.noted.items()))]
        if self.repeated:
            parts.append(f"{self.repeated} repeated")
        return "; ".join(parts)

"""What every host must have alike before they compute together, and who differs.

Hosts run the same programs on one mesh. One with another version, flag or model would hang all of them in the first
exchange, or answer nonsense; so each tells what it has before anything is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

_REMEDIES: Final = {
    "versions": "install the same versions everywhere",
    "model": "give every host the same model",
    "settings": "give every host the same flags",
    "environment": "set the variables alike everywhere",
    "devices": "use hosts of one kind",
}
"""Field of HostFacts -> what to do when it differs, in the order of telling."""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One host. What all must have alike stands by name in the mappings; a name that a host does not know is not
    compared for it.

    `versions`: by package. `model`: digests and sizes. `settings`: by flag. `environment`: by variable. `devices`:
    what it has and how many.
    """

    rank: int
    nodes: int
    versions: dict[str, str]
    model: dict[str, str]
    settings: dict[str, str]
    environment: dict[str, str]
    devices: dict[str, str]


@dataclass(frozen=True, slots=True)
class Host:
    """A host that was met. `address`: as the others see it."""

    facts: HostFacts
    address: str

    def __str__(self) -> str:
        return host_name(self.facts.rank, self.address)


def host_name(rank: int, address: str) -> str:
    """How messages call a host."""
    return f"host {rank} ({address})"


def differences(hosts: Sequence[Host]) -> str:
    """Who differs from most hosts in what, and the remedy, in one line; empty when nobody does.

    `hosts` in the order of their ranks: where as many have one value as another, that of the first host counts.
    """
    found: dict[str, list[str]] = {}
    remedies = []
    for field, remedy in _REMEDIES.items():
        tables = {str(host): getattr(host.facts, field) for host in hosts}
        for host, text in _odd_ones(tables):
            found.setdefault(host, []).append(text)
            if remedy not in remedies:
                remedies.append(remedy)
    told = "; ".join(f"{host} has {', '.join(texts)}" for host, texts in found.items())
    return f"{told}; {', '.join(remedies)}" if found else ""


def _odd_ones(tables: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    """(host, how it differs) for everything that the tables do not have alike."""
    names = dict.fromkeys(name for table in tables.values() for name in table)
    found = []
    for name in names:
        usual = Counter(table[name] for table in tables.values() if name in table).most_common(1)[0][0]
        for host, table in tables.items():
            if table.get(name, usual) != usual:
                found.append((host, f"{name} {_shown(table[name])} instead of {_shown(usual)}"))
    return found


def _shown(value: str) -> str:
    return value[:200] or "nothing"

"""Who else computes the engine's steps: other hosts, or other ranks on this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pagoda.common.backend import Backend
from pagoda.common.hosts.following import FollowingBackend
from pagoda.common.hosts.leading import LeadingBackend
from pagoda.common.weights.checkpoint import Checkpoint


class Company(Protocol):
    """The others, met or started."""

    def arrive(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """Once the weights are on disk and the backend is imported; what `create` is told about the others.

        Raises ConfigError or EngineDeadError.
        """
        ...

    def joined(self, backend: Backend) -> LeadingBackend | FollowingBackend:
        """This process's backend, in step with the others'."""
        ...

"""Which of several others was the first that failed or vanished: the rest may end because of it."""

from __future__ import annotations

import threading

from pagoda.common.errors import EngineDeadError
from pagoda.common.hosts.peer import OnLoss


class Loss:
    """Nobody is lost at first. Used by several threads."""

    def __init__(self) -> None:
        self._noting = threading.Lock()
        self._known = threading.Event()
        self._cause: EngineDeadError | None = None
        self._on_loss: OnLoss | None = None

    def note(self, death: EngineDeadError) -> bool:
        """One is lost. True when it is the first, and who watches has been told."""
        with self._noting:
            if self._cause is not None:
                return False
            self._cause, on_loss = death, self._on_loss
        self._known.set()
        if on_loss is not None:
            on_loss(death)
        return True

    def watch(self, on_loss: OnLoss) -> None:
        """Call back, from another thread, when one is lost; at once if one is already."""
        with self._noting:
            self._on_loss, cause = on_loss, self._cause
        if cause is not None:
            on_loss(cause)

    def cause(self, patience: float = 0.0) -> EngineDeadError | None:
        """What the first died of, None while all live. `patience`: seconds to wait for that news."""
        self._known.wait(patience)
        return self._cause

    def explain(self, patience: float = 0.0) -> None:
        """Raise what the first died of, if one did: the cause of an error that is being handled, or soon will be.

        Waits a moment for news: that one is gone may be felt here before it is known.
        """
        if (death := self.cause(patience)) is not None:
            raise death

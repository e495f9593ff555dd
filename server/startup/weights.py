"""The parameters of a model, from its checkpoint or made up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pagoda.common.backend import Weight
from pagoda.common.config.engine import EngineConfig
from pagoda.common.models.shapes import params
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.common.weights.dummy import dummy_weights
from pagoda.common.weights.progress import with_progress
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.server.settings.resolve import Resolved


def read_weights(config: EngineConfig, checkpoint: Checkpoint, resolved: Resolved) -> Iterator[Weight]:
    """Every parameter of the model, from its checkpoint or random; none of a sharded one."""
    wanted = params(resolved.spec)
    if isinstance(checkpoint, ShardedCheckpoint):
        return iter(())  # the backend reads its arrays itself
    if config.load.load_format == "dummy":
        return dummy_weights(wanted, config.model.seed, resolved.dtype)
    tensors = with_progress(checkpoint.tensors(), checkpoint.num_bytes, disable=not config.load.use_tqdm_on_load)
    modules = resolved.purpose.modules if resolved.purpose is not None else None
    return resolved.family.weights(wanted, tensors if modules is None else chain(tensors, modules.tensors()))

"""Pooling params resolved against what the model offers: its tasks, activation and dimensions."""

from __future__ import annotations

from pagoda.common.engine.pooling.values import EMBEDS, OF_TOKENS, PARTS, PoolingRules, PoolingTask
from pagoda.common.errors import RequestError
from pagoda.common.models.spec import TokenSelection
from pagoda.common.pooling_params import PoolingParams
from pagoda.server.core_client.ipc_messages import PoolingInfo


def pooling_rules(info: PoolingInfo, params: PoolingParams, second_text: int | None) -> PoolingRules:
    """Return how a prompt is pooled. `second_text`: first token of a pair's second text. Raises RequestError."""
    params.verify()
    task = resolve_task(info, params.task)
    return PoolingRules(
        task=task,
        use_activation=info.use_activation if params.use_activation is None else params.use_activation,
        dimensions=_dimensions(info, params.dimensions, task),
        second_text=second_text,
        selection=_selection(info, params.step_tag_id, task),
    )


def resolve_task(info: PoolingInfo, name: str | None) -> PoolingTask:
    """Return the named task, or the model's default. Raises RequestError if the model does not offer it."""
    if name is None:
        return info.tasks[0]
    for task in info.tasks:
        if task == name:
            return task
    hint = {"embed": " (--convert embed)", "classify": " (--convert classify)"}.get(name, "")
    raise RequestError("task", f"Unsupported task: {name!r}{hint}; this model offers {', '.join(info.tasks)}")


def _selection(info: PoolingInfo, tag: int | None, task: PoolingTask) -> TokenSelection:
    """Return which tokens have an output. Raises RequestError for a tag in a task with one output."""
    if tag is None:
        return info.selections.get(task, TokenSelection())
    if task not in OF_TOKENS:
        raise RequestError("step_tag_id", f"step_tag_id selects outputs of tokens; task {task!r} has one output")
    return TokenSelection(tag=tag)


def _dimensions(info: PoolingInfo, dimensions: int | None, task: PoolingTask) -> int | None:
    """Return how many dimensions of an embedding are kept, None for all. Raises RequestError."""
    embeds = not EMBEDS.isdisjoint(PARTS.get(task, (task,)))
    if dimensions is None:
        return info.default_dimensions if embeds else None
    if not embeds:
        raise RequestError("dimensions", f"dimensions applies to embeddings; task {task!r} has none")
    if not info.is_matryoshka:
        raise RequestError(
            "dimensions",
            f"this model's embeddings cannot be shortened (no Matryoshka); leave dimensions out to get all "
            f"{info.embedding_size}",
        )
    if info.dimensions and dimensions not in info.dimensions:
        raise RequestError(
            "dimensions", f"dimensions {dimensions} is not one of {', '.join(str(size) for size in info.dimensions)}"
        )
    if dimensions > info.embedding_size:
        raise RequestError("dimensions", f"dimensions {dimensions} is above the model's {info.embedding_size}")
    return dimensions

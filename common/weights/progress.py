"""A progress bar around a stream of tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from pagoda.common.weights.mapped import NamedTensor


def with_progress(
    tensors: Iterable[NamedTensor], total: int, *, description: str = "Loading weights", disable: bool = False
) -> Iterator[NamedTensor]:
    """The same tensors, with a bar on stderr that counts their bytes towards `total`.

    Silent when `disable` is set or stderr is no terminal.
    """
    if disable or not sys.stderr.isatty():
        yield from tensors
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=description, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr) as bar:
        for name, array in tensors:
            yield name, array
            bar.update(array.nbytes)

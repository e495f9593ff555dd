"""Launches of Triton kernels that are bound ahead: what a call was compiled to is found by types and alignment alone.

At each launch Triton binds names, specialises every argument, compares a key of strings and the values of globals. A
step that is not captured launches hundreds of kernels with the arguments of the last one, but for addresses and counts.
Here such a launch costs the tuple that it is found by, about half of that; a launch whose last arguments are fixed once
for a layer describes the others alone. Keys are at least as fine as Triton's, so no program runs that Triton would not
run. What is new is launched by Triton, which compiles it. Triton's launch hooks are not called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Final

from torch import Tensor
from triton.runtime import driver

_ALIGNMENT: Final = 16
_NARROW: Final = 1 << 31
"""First integer that Triton passes in 64 bits."""

Key = tuple[Any, ...]


class BoundKernel:
    """A kernel's launcher: `BoundKernel(kernel)[grid](*arguments, **constants)`, tensors first on the device.

    Positional arguments are all that the kernel has at run time, keywords its constants and options.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._programs: dict[Key, dict[Key, Any]] = {}  # by what is fixed, then by the other arguments
        self._unused: tuple[None, ...] | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def fixed(self, *last: Any, **constants: Any) -> BoundLaunch:
        """Return a launcher with the last arguments and all constants fixed."""
        return BoundLaunch(self, last, constants)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        self.start(grid, args, (), [], constants, self.programs((), constants))

    def programs(self, fixed: Key, constants: Mapping[str, Any]) -> dict[Key, Any]:
        """Return the programs compiled so far for the constants, and fixed arguments with the key `fixed`."""
        return self._programs.setdefault((*constants, *constants.values(), *fixed), {})

    def start(
        self,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        last: tuple[Any, ...],
        last_values: list[Any],
        constants: Mapping[str, Any],
        programs: dict[Key, Any],
    ) -> None:
        """Launch with arguments `args`, then `last`, which a program takes as `last_values`."""
        if self._unused is None:
            self._unused = self._constants_after(len(args) + len(last))
        device = args[0].get_device()
        if device < 0:  # the interpreter
            self.kernel[grid](*args, *last, **constants)
            return
        key, values = describe(args)
        found_by = (device, *key)
        program = programs.get(found_by)
        if program is None:
            programs[found_by] = self._compile(grid, (*args, *last), constants)
            return
        run, function, metadata = program
        stream = driver.active.get_current_stream(device)
        run(*(*grid, 1, 1)[:3], stream, function, metadata, None, None, None, *values, *last_values, *self._unused)

    def _compile(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: Mapping[str, Any]) -> Key:
        """Let Triton launch the kernel; return what launches its program again."""
        compiled = self.kernel[grid](*args, **constants)
        return compiled.run, compiled.function, compiled.packed_metadata

    def _constants_after(self, arguments: int) -> tuple[None, ...]:
        """Return what a compiled program takes in place of its constants.

        Raise TypeError unless the first `arguments` parameters, and no others, are arguments at run time.
        """
        parameters = inspect.signature(self.kernel.fn).parameters.values()
        late = [each.name for each in parameters if "constexpr" not in str(each.annotation)]
        if late != [each.name for each in parameters][:arguments]:
            raise TypeError(f"{self.kernel.fn.__name__} has {arguments} arguments by position, but needs {late}")
        return (None,) * (len(parameters) - arguments)


class BoundLaunch:
    """A kernel with its last arguments and all constants fixed: `launch(grid, *first arguments)`.

    The addresses of fixed tensors are read once, as by a graph that is captured.
    """

    def __init__(self, kernel: BoundKernel, last: tuple[Any, ...], constants: Mapping[str, Any]) -> None:
        self._kernel = kernel
        self._last = last
        self._constants = constants
        key, self._values = describe(last)
        self._programs = kernel.programs(key, constants)

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        self._kernel.start(grid, args, self._last, self._values, self._constants, self._programs)


def describe(args: tuple[Any, ...]) -> tuple[Key, list[Any]]:
    """Return what arguments are compiled for, and what a program takes of them."""
    key: list[Any] = []
    values: list[Any] = []
    for value in args:
        if isinstance(value, Tensor):
            address = value.data_ptr()
            key.append(value.dtype if not address % _ALIGNMENT else (value.dtype, address % _ALIGNMENT))
            values.append(address)
        else:
            key.append(_kind(value) if type(value) is int else value if value is None else type(value))
            values.append(value)
    return tuple(key), values


@lru_cache(maxsize=1 << 12)
def _kind(value: int) -> Any:
    """Return what Triton may specialise for."""
    return value if value == 1 else (value % _ALIGNMENT == 0, -_NARROW <= value < _NARROW)

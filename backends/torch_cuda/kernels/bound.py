"""Launches of Triton kernels that are bound ahead: what a call was compiled to is found by types and alignment alone.

At each launch Triton binds names, specialises every argument, compares a key of strings and the values of globals. A
step that is not captured launches hundreds of kernels with the arguments of the last one, but for addresses and counts.
Here such a launch costs the tuple that it is found by, about half of that. Keys are at least as fine as Triton's, so no
program runs that Triton would not run. What is new is launched by Triton, which compiles it. Triton's launch hooks are
not called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch import Tensor
from triton.runtime import driver

_ALIGNMENT: Final = 16
_NARROW: Final = 1 << 31
"""First integer that Triton passes in 64 bits."""


class BoundKernel:
    """A kernel's launcher: `BoundKernel(kernel)[grid](*arguments, **constants)`, tensors first on the device.

    Positional arguments are all that the kernel has at run time, keywords its constants and options.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._unused: tuple[None, ...] | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if self._unused is None:
            self._unused = self._constants_after(len(args))
        device = args[0].get_device()
        if device < 0:  # the interpreter
            self.kernel[grid](*args, **constants)
            return
        found_by, program, values = self.find(device, args, constants)
        if program is None:
            compiled = self.kernel[grid](*args, **constants)
            self._programs[found_by] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = program
        stream = driver.active.get_current_stream(device)
        run(*(*grid, 1, 1)[:3], stream, function, metadata, None, None, None, *values, *self._unused)

    def find(
        self, device: int, args: tuple[Any, ...], constants: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Any, list[Any]]:
        """Return the key of a launch, its program, None if it has not been launched, and what the program takes."""
        key, values = [device, *constants, *constants.values()], []
        for value in args:
            if isinstance(value, Tensor):
                address = value.data_ptr()
                key.append(value.dtype if not address % _ALIGNMENT else (value.dtype, address % _ALIGNMENT))
                values.append(address)
            else:
                key.append(_kind(value) if type(value) is int else value if value is None else type(value))
                values.append(value)
        found_by = tuple(key)
        return found_by, self._programs.get(found_by), values

    def _constants_after(self, arguments: int) -> tuple[None, ...]:
        """Return what a compiled program takes in place of its constants.

        Raise TypeError unless the first `arguments` parameters, and no others, are arguments at run time.
        """
        parameters = inspect.signature(self.kernel.fn).parameters.values()
        late = [each.name for each in parameters if "constexpr" not in str(each.annotation)]
        if late != [each.name for each in parameters][:arguments]:
            raise TypeError(f"{self.kernel.fn.__name__} has {arguments} arguments by position, but needs {late}")
        return (None,) * (len(parameters) - arguments)


def _kind(value: int) -> Any:
    """Return what Triton may specialise for."""
    return value if value == 1 else (value % _ALIGNMENT == 0, -_NARROW <= value < _NARROW)

"""Launches of Triton kernels that are bound ahead: a compiled program is looked up by types and alignment alone.

At each launch Triton binds names, specialises every argument, and compares a key of strings and the values of globals.
A step that is not captured launches hundreds of kernels whose arguments differ from those of the last step in addresses
and counts alone. Here such a launch costs about half as much: it builds the tuple that its program is looked up by. A
launch whose last arguments are fixed once for a layer describes only the others. Keys are at least as fine as Triton's,
so no program runs that Triton would not run. A combination that is new is launched by Triton, which compiles it.
Triton's launch hooks are not called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from typing import Any, Final

from torch import Tensor
from triton.runtime import driver

_ALIGNMENT: Final = 16
_NARROW: Final = 1 << 31
"""First integer that Triton passes in 64 bits."""

OPTIONS: Final = ("num_warps", "num_stages", "enable_fp_fusion")
"""Triton's options that a launch may choose."""

Key = tuple[Any, ...]


class BoundKernel:
    """A kernel's launcher: `BoundKernel(kernel)[grid](x=x, count=count, SIZE=16, num_warps=4)`, all by keyword.

    Keywords are the kernel's arguments, its constants and Triton's options. The first argument is a tensor. Raise
    TypeError if a constant of the kernel stands before one of its arguments.
    """

    def __init__(self, kernel: Any) -> None:
        parameters = inspect.signature(kernel.fn).parameters.values()
        names = [parameter.name for parameter in parameters]
        self.kernel = kernel
        self.arguments = tuple(x.name for x in parameters if "constexpr" not in str(x.annotation))
        self.constants = tuple(names[len(self.arguments) :])
        if names != [*self.arguments, *self.constants]:
            raise TypeError(f"{kernel.fn.__name__} has constants before its last argument, {self.arguments[-1]}")
        self._launch = _with_keywords(kernel.fn.__name__, self.arguments, self.constants)
        self._launches: dict[Key, BoundLaunch] = {}  # The key is the values of constants and options.
        self._programs: dict[Key, dict[Key, Any]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, self, grid)

    def fixed(self, **given: Any) -> Callable[..., None]:
        """Return `launch(grid, x=x)`: the constants and the kernel's last arguments, those that are given, are fixed.

        The addresses of fixed tensors are read once, as by a graph that is captured. Raise TypeError if other arguments
        than the last ones are fixed.
        """
        launch = BoundLaunch(self, given)
        return partial(_with_keywords(self.kernel.fn.__name__, launch.names), launch)

    def start(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        """Launch with the values of all arguments, and of constants and options, in the kernel's order."""
        launch = self._launches.get(constants)
        if launch is None:
            given = dict(zip((*self.constants, *OPTIONS), constants, strict=True))
            absent = [name for name in OPTIONS if given[name] is None]
            launch = BoundLaunch(self, {name: value for name, value in given.items() if name not in absent})
            self._launches[constants] = launch
        launch.start(grid, args)

    def programs(self, fixed: Key, constants: Mapping[str, Any]) -> dict[Key, Any]:
        """Return the programs compiled so far for the constants, and fixed arguments with the key `fixed`."""
        return self._programs.setdefault((*constants, *constants.values(), *fixed), {})


class BoundLaunch:
    """A kernel with constants, options and the last of its arguments fixed; the others are called `names`."""

    def __init__(self, kernel: BoundKernel, given: Mapping[str, Any]) -> None:
        last = {name: given[name] for name in kernel.arguments if name in given}
        constants = {name: value for name, value in given.items() if name not in last}
        self.kernel = kernel.kernel
        self.names = kernel.arguments[: len(kernel.arguments) - len(last)]
        if kernel.arguments != (*self.names, *last):
            raise TypeError(f"{self.kernel.fn.__name__}: {', '.join(last)} are not its last arguments")
        self._given = {**last, **constants}
        key, values = describe(tuple(last.values()))
        self._values = *values, *[None] * len(kernel.constants)
        self._programs = kernel.programs(key, constants)

    def start(self, grid: tuple[int, ...], first: tuple[Any, ...]) -> None:
        """Launch with the values of the arguments that are not fixed, in the kernel's order."""
        device = first[0].get_device()
        if device < 0:  # the interpreter
            self.kernel[grid](**dict(zip(self.names, first, strict=True)), **self._given)
            return
        key, values = describe(first)
        found_by = (device, *key)
        program = self._programs.get(found_by)
        if program is None:
            self._programs[found_by] = self._compile(grid, first)
            return
        run, function, metadata = program
        stream = driver.active.get_current_stream(device)
        run(*(*grid, 1, 1)[:3], stream, function, metadata, None, None, None, *values, *self._values)

    def _compile(self, grid: tuple[int, ...], first: tuple[Any, ...]) -> Key:
        """Let Triton launch the kernel; return what launches its program again."""
        compiled = self.kernel[grid](**dict(zip(self.names, first, strict=True)), **self._given)
        return compiled.run, compiled.function, compiled.packed_metadata


@cache
def _with_keywords(name: str, arguments: tuple[str, ...], constants: tuple[str, ...] = ()) -> Callable[..., None]:
    """Return a function `name` of a launcher, a grid and these keywords, which starts the launcher with their values.

    With constants, Triton's options are keywords too. Python matches keywords with the parameters of a function in a
    fraction of the time that a dictionary of them costs.
    """
    values = [f"({', '.join(arguments)},)"]
    keywords = [*arguments, *constants]
    if constants:
        values.append(f"({', '.join((*constants, *OPTIONS))})")
        keywords += [f"{option}=None" for option in OPTIONS]
    head = f"def {name}(_launcher, _grid, /, *, {', '.join(keywords)}):"
    namespace: dict[str, Any] = {}
    exec(f"{head} _launcher.start(_grid, {', '.join(values)})", namespace)
    made: Callable[..., None] = namespace[name]
    return made


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

"""The interpreter, its packages, and the variables it runs under."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from pagoda.backends.registry import choose_backend
from pagoda.common.config import env
from pagoda.common.config.commands import COMMAND_SETTINGS
from pagoda.common.config.doctor import DoctorConfig
from pagoda.common.config.sources import from_environment
from pagoda.common.errors import ConfigError
from pagoda.server.commands.checks import machine
from pagoda.server.commands.checks.finding import Finding, Findings

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_EXTRAS: Final = {"reference": "cpu", "torch_cuda": "cuda", "jax_tpu": "tpu"}
"""Backend -> the extra that brings its packages."""


def python_version(config: DoctorConfig) -> Findings:
    """The interpreter, against the range that pagoda is made for."""
    found, (wanted, _) = platform.python_version(), machine.project()
    if not wanted or _within(found, wanted) is not False:
        yield Finding("ok", "python", found)
    else:
        yield Finding("fail", "python", f"{found} is outside {wanted}; make an environment with such a Python")


def packages(config: DoctorConfig) -> Findings:
    """What is installed, against the ranges of the base and of the chosen backend's extra."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Finding("warn", "packages", "versions cannot be compared; pip install packaging")
        return
    extras = {"gguf", "uvloop", _EXTRAS.get(_chosen(config), "")}
    good = 0
    wanted = list(_applying(map(Requirement, machine.project()[1]), extras))
    for requirement in list(wanted):  # "jax[tpu]" says which libtpu is meant
        wanted += _applying(map(Requirement, machine.requires(requirement.name)), requirement.extras, base=False)
    for requirement in wanted:
        optional = _is_optional(requirement)
        found = machine.version(requirement.name)
        remedy = f"pip install '{requirement.name}{requirement.specifier}'"
        if found is None and not optional:
            yield Finding("fail", "packages", f"{requirement.name} is not installed; {remedy}")
        elif found is not None and not requirement.specifier.contains(found, prereleases=True):
            yield Finding("warn", "packages", f"{requirement.name} {found} is not a version that was tried; {remedy}")
        else:
            good += found is not None
    yield Finding("ok", "packages", f"{good} in their ranges")


def _applying(requirements: Iterable[Requirement], extras: Collection[str], base: bool = True) -> Iterator[Requirement]:
    """Those of the base, unless `base` is False, and those of these extras."""
    for requirement in requirements:
        if not _is_optional(requirement):
            if base:
                yield requirement
        elif any(requirement.marker.evaluate({"extra": extra}) for extra in extras if extra):  # type: ignore[union-attr]
            yield requirement


def _is_optional(requirement: Requirement) -> bool:
    return requirement.marker is not None and "extra" in str(requirement.marker)


def environment(config: DoctorConfig) -> Findings:
    """Variables that have no effect, are refused, or cannot be read."""
    settings = COMMAND_SETTINGS["serve"]
    quiet = True
    try:
        from_environment([settings])
        for note in env.notes(settings={name for each in COMMAND_SETTINGS.values() for name in each}):
            quiet = False
            yield Finding("warn", "environment", note)
    except ConfigError as error:
        yield Finding("fail", "environment", str(error))
    else:
        if quiet:
            yield Finding("ok", "environment", "no variable that is without effect")


def _chosen(config: DoctorConfig) -> str:
    try:
        return choose_backend(config.backend)
    except ConfigError:
        return config.backend


def _within(version: str, wanted: str) -> bool | None:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return None
    return SpecifierSet(wanted).contains(version, prereleases=True)

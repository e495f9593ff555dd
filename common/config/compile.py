"""What `compile` compiles for, and where it puts that."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.common.config.option import option
from pagoda.common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """The chips of `compile`; no chip is needed to compile for them."""

    topology: str | None = option(
        None, "Chips to compile for, such as v6e:2x4 or v5p:2x2x1; cpu: this machine's processor."
    )
    config_only: bool = option(False, "Read config.json alone, the file or its folder: no weights are needed.")
    tensor_parallel_size: int | None = option(
        None,
        "Devices that share each layer; default: as many as the topology has for it.",
        aliases=("-tp",),
    )
    budget_only: bool = option(
        False, "Compile only the largest program of each kind: enough to tell what fits, and not for a bundle."
    )
    output: str | None = option(
        None,
        "Folder for the compiled programs, for serve --compiled-bundle; whoever loads it runs what is in it.",
        aliases=("-o",),
    )
    output_json: str | None = option(None, "File for the table as JSON.")

    def __post_init__(self) -> None:
        if self.tensor_parallel_size is not None and self.tensor_parallel_size < 1:
            raise ConfigError("--tensor-parallel-size", f"{self.tensor_parallel_size} is not positive; use 1 or more")
        if self.budget_only and self.output is not None:
            raise ConfigError("--budget-only", "compiles too few programs for --output; drop one of them")

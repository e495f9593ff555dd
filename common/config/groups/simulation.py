"""Settings of the `simulated` backend and of `pagoda simulate`: what says how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagoda.common.config.fields import option
from pagoda.common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """How long simulated steps take, and which drafts are accepted. Read by the backend `simulated` only."""

    calibration: str | None = option(
        None, "File of measured step times, written by `pagoda calibrate`, for --backend simulated."
    )
    hardware: str | None = option(
        None,
        "Accelerator to simulate by its data sheet: a100, h100, h200, b200, l4, v5e, v5p, v6e or v7x; see "
        "docs/guides/capacity-planning.md.",
    )
    compile_report: str | None = option(
        None,
        "Report of `pagoda compile --output-json`, whose cycles take the place of the roofline of --hardware.",
    )
    acceptance_rate: float | None = option(
        None,
        "Assumed probability that a draft is accepted if all before it are, for --backend simulated; every sequence "
        "then has drafts in every step. Default: drafts are checked against the simulated output tokens.",
    )
    simulated_time: Literal["real", "none"] = option(
        "real",
        "real: a step of --backend simulated takes as long as the model of step times says; none: it takes no time.",
    )

    def __post_init__(self) -> None:
        if self.calibration is not None and self.hardware is not None:
            raise ConfigError("--hardware", "step times are those of --calibration already; drop one of them")
        rate = self.acceptance_rate
        if rate is not None and not 0 <= rate <= 1:
            raise ConfigError("--acceptance-rate", f"{rate} is not a probability; use a number from 0 to 1")

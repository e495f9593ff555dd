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
        None, "For --backend simulated: file of measured step times, written by `pagoda calibrate`."
    )
    hardware: str | None = option(
        None,
        "For --backend simulated: accelerator whose step times are computed from its data sheet: a100, h100, h200, "
        "b200, l4, v5e, v5p, v6e or v7x; see docs/guides/capacity-planning.md.",
    )
    compile_report: str | None = option(
        None,
        "Report of `pagoda compile --output-json`. Its cycle counts replace the roofline estimate of --hardware.",
    )
    acceptance_rate: float | None = option(
        None,
        "For --backend simulated: probability that a draft token is accepted if all drafts before it are. Every "
        "sequence then has drafts in every step. Default: drafts are compared with the simulated output tokens.",
    )
    simulated_time: Literal["real", "none"] = option(
        "real",
        "Duration of a step of --backend simulated. real: as long as the model of step times predicts; none: no time.",
    )

    def __post_init__(self) -> None:
        if self.calibration is not None and self.hardware is not None:
            raise ConfigError("--hardware", "step times are those of --calibration already; drop one of them")
        rate = self.acceptance_rate
        if rate is not None and not 0 <= rate <= 1:
            raise ConfigError("--acceptance-rate", f"{rate} is not a probability; use a number from 0 to 1")

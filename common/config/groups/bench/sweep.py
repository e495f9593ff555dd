"""Settings of `bench sweep`: grids of parameters, the search for a load that meets objectives, and plots of results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pagoda.common.config.fields import comma_separated, need_not_negative, need_positive, option
from pagoda.common.errors import ConfigError

SCALES: Final = ("linear", "log", "sqrt")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """Runs of a sweep, and the folder of their results."""

    serve_params: str | None = option(
        None,
        "JSON file with the combinations of server flags to run: a list of objects, or an object of named objects. "
        "Default: one run without extra flags.",
    )
    output_dir: str = option("results", "Directory of all experiments.", aliases=("-o",))
    experiment_name: str | None = option(
        None, "Name of this experiment's folder in --output-dir; default: the current time.", aliases=("-e",)
    )
    num_runs: int = option(3, "Number of measured runs per combination.")
    resume: bool = option(False, "Continue an experiment: run only the combinations without results.")
    dry_run: bool = option(False, "Print the commands without running them.")
    show_stdout: bool = option(False, "Show the output of the commands.")

    def __post_init__(self) -> None:
        need_positive(self, "num_runs")
        if self.resume and self.experiment_name is None:
            raise ConfigError("--experiment-name", "is required by --resume; name the experiment to continue")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepServeConfig:
    """Server and benchmark commands of a sweep."""

    serve_cmd: str | None = option(None, "Command of the server, such as 'pagoda serve MODEL'.")
    bench_cmd: str | None = option(None, "Command of the benchmark, such as 'pagoda bench serve --num-prompts 100'.")
    after_bench_cmd: str | None = option(
        None, "Command to run after each benchmark; default: reset the server's prefix cache."
    )
    bench_params: str | None = option(
        None,
        "JSON file with the combinations of benchmark flags to run; each runs with each combination of --serve-params.",
    )
    link_vars: tuple[str, ...] = option(
        (),
        "Comma-separated SERVE=BENCH pairs of parameters: run only combinations in which both are equal, such as "
        "max_num_seqs=max_concurrency.",
        parse=comma_separated,
    )
    warmup_num_prompts: int = option(
        0, "Number of requests of a warm-up run before the measured runs of each combination; 0: no warm-up."
    )
    server_ready_timeout: int = option(300, "Seconds to wait until the server is ready.")
    continue_on_error: bool = option(False, "Record a failed run and continue with the next. Otherwise the sweep ends.")

    def __post_init__(self) -> None:
        for name in ("serve_cmd", "bench_cmd"):
            if not (getattr(self, name) or "").strip():
                raise ConfigError("--" + name.replace("_", "-"), "is required; give the command in quotes")
        need_not_negative(self, "warmup_num_prompts")
        need_positive(self, "server_ready_timeout")
        for pair in self.link_vars:
            if not all(pair.partition("=")):
                raise ConfigError("--link-vars", f"{pair} is not SERVE=BENCH, such as max_num_seqs=max_concurrency")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlaConfig:
    """The objectives of `bench sweep serve_sla`, and the load that is searched."""

    sla_params: str | None = option(
        None, 'JSON file of objectives: a list of objects such as {"p99_ttft_ms": "<=500", "mean_tpot_ms": "<50"}.'
    )
    sla_variable: Literal["request_rate", "max_concurrency"] = option(
        "request_rate", "Integer flag to search: the sweep finds its largest value that meets the objectives."
    )
    sla_iters: int = option(20, "Maximum number of values to try per combination.")

    def __post_init__(self) -> None:
        if not self.sla_params:
            raise ConfigError("--sla-params", "is required; name a JSON file of objectives")
        need_positive(self, "sla_iters")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStartupConfig:
    """The command of `bench sweep startup`."""

    startup_cmd: str = option("pagoda bench startup", "Command of the benchmark.")
    startup_params: str | None = option(
        None,
        "JSON file with the combinations of benchmark flags to run; each runs with each combination of --serve-params.",
    )
    strict_params: bool = option(
        False,
        "Refuse parameters that `bench startup` does not have.",
        no_effect="they are always refused, by the command itself",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotConfig:
    """Figures of `bench sweep plot`; the report page has the same curves."""

    fig_dir: str = option("", "Directory of the figures, relative to the experiment's.")
    fig_by: tuple[str, ...] = option(
        (), "Comma-separated variables; each combination of their values gets its own figure.", parse=comma_separated
    )
    row_by: tuple[str, ...] = option(
        (),
        "Comma-separated variables; each combination of their values gets its own row of plots.",
        parse=comma_separated,
    )
    col_by: tuple[str, ...] = option(
        (),
        "Comma-separated variables; each combination of their values gets its own column of plots.",
        parse=comma_separated,
    )
    curve_by: tuple[str, ...] = option(
        (), "Comma-separated variables; each combination of their values gets its own curve.", parse=comma_separated
    )
    var_x: str = option("total_token_throughput", "Variable of the x axis.")
    var_y: str = option("median_ttft_ms", "Variable of the y axis.")
    filter_by: tuple[str, ...] = option(
        (), "Comma-separated conditions on the runs, such as max_concurrency<=64.", parse=comma_separated
    )
    bin_by: tuple[str, ...] = option(
        (),
        "Comma-separated NAME%SIZE pairs, such as request_rate%2: values of the variable are rounded down to "
        "multiples of the size.",
        parse=comma_separated,
    )
    scale_x: str | None = option(None, "Scale of the x axis.", choices=SCALES)
    scale_y: str | None = option(None, "Scale of the y axis.", choices=SCALES)
    fig_name: str = option("FIGURE", "Prefix of the figures' file names.")
    fig_width: float = option(6.4, "Width of each plot, in inches.")
    fig_height: float = option(4.8, "Height of each plot, in inches.")
    fig_dpi: int = option(300, "Resolution of the figures, in dots per inch.")
    no_error_bars: bool = option(False, "Do not draw the standard deviation over the runs of a combination.")
    dry_run: bool = option(False, "Print the figures without drawing them.")

    def __post_init__(self) -> None:
        need_positive(self, "fig_dpi")
        for name in ("fig_width", "fig_height"):
            if not getattr(self, name) > 0:
                raise ConfigError("--" + name.replace("_", "-"), "is not positive; use 6.4")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoConfig:
    """The figure of `bench sweep plot_pareto`: tokens per second and user against tokens per second and device."""

    user_count_var: str = option(
        "max_concurrency", "Variable that holds the number of users; default: the measured peak of concurrent requests."
    )
    gpu_count_var: str | None = option(
        None,
        "Variable that holds the number of devices; default: the product of the tensor, pipeline and data parallel "
        "sizes.",
    )
    label_by: tuple[str, ...] = option(
        ("max_concurrency", "gpu_count"),
        "Comma-separated variables whose values label the points of the frontier.",
        parse=comma_separated,
    )
    dry_run: bool = option(False, "Print the points without drawing them.")

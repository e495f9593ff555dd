"""The model that would be served."""

from __future__ import annotations

from pathlib import Path

from pagoda.common.config.doctor import DoctorConfig
from pagoda.common.errors import PagodaError
from pagoda.server.commands.checks import machine
from pagoda.server.commands.checks.finding import Finding, Findings


def model(config: DoctorConfig) -> Findings:
    """Whether the model's files are here and describe a model that can be served."""
    if config.model is None:
        return
    path = Path(config.model).expanduser()
    if not path.exists() and not _is_downloaded(config):
        yield Finding("ok", "model", f"{config.model} is not here; serve would look for it on the hub")
        return
    from pagoda.server.settings.args import EngineArgs
    from pagoda.server.settings.resolve import resolve

    try:
        asked = EngineArgs(
            config.model,
            backend=config.backend,
            download_dir=config.download_dir,
            tensor_parallel_size=config.tensor_parallel_size,
            data_parallel_size=config.data_parallel_size,
        )
        found = resolve(asked.create_engine_config(), "server")
    except PagodaError as error:
        yield Finding("fail", "model", str(error))
        return
    yield Finding("ok", "model", f"{config.model}: {found.dtype}, up to {found.limits.max_model_len} tokens")


def _is_downloaded(config: DoctorConfig) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repository = (config.model or "").partition(":")[0]
    cache = machine.hub_cache(config.download_dir)
    try:
        return isinstance(try_to_load_from_cache(repository, "config.json", cache_dir=cache), str)
    except (HFValidationError, OSError):
        return False

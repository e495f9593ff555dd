"""Engine settings of vLLM that pagoda does not have: at these values they change nothing and are accepted.

Any other value is refused by name. A setting leaves this table when a configuration dataclass takes it in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagoda.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Compat:
    """One such setting. `accepted`: harmless values, the default first. `flag`: also on the command line."""

    name: str
    accepted: tuple[Any, ...]
    reason: str
    aliases: tuple[str, ...] = ()
    flag: bool = True

    @property
    def option(self) -> str:
        """`--its-flag`."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> None:
        """Raise ConfigError unless the value is harmless."""
        if value is not None and not any(value == each and type(value) is type(each) for each in self.accepted):
            raise ConfigError(self.option, f"{value!r} is not supported: {self.reason}")


_ONE_DEVICE = "this version runs on one device; use 1"
_BOTH = (False, True)

COMPAT: dict[str, Compat] = {
    each.name: each
    for each in (
        Compat("tensor_parallel_size", (1,), _ONE_DEVICE, ("-tp",)),
        Compat("pipeline_parallel_size", (1,), _ONE_DEVICE, ("-pp",)),
        Compat("data_parallel_size", (1,), _ONE_DEVICE, ("-dp",)),
        Compat("enable_expert_parallel", (False,), "this version runs on one device"),
        Compat("trust_remote_code", (False,), "no code of a checkpoint is ever run; models are data here"),
        Compat("enforce_eager", _BOTH, "nothing is compiled or captured by this version's backends"),
        Compat("tokenizer_mode", ("auto",), "tokenizer.json and GGUF tokenizers only; use auto"),
        Compat("quantization", ("gguf",), "only what the checkpoint itself carries (GGUF) is read", ("-q",)),
        Compat("kv_cache_dtype", ("auto",), "the KV cache has the model's dtype; use auto"),
        Compat("cpu_offload_gb", (0, 0.0), "weights stay on the device; use 0"),
        Compat("enable_lora", (False,), "LoRA adapters are not in this version"),
        Compat("enable_prompt_embeds", (False,), "prompts are text or token ids"),
        Compat("logprobs_mode", ("raw_logprobs",), "logprobs are of the raw logits; use raw_logprobs"),
        Compat("runner", ("auto", "generate"), "only text generation is served; use generate"),
        Compat("hf_overrides", ({},), "edit the model's config.json instead", flag=False),
        Compat("speculative_config", (), "speculative decoding is not in this version", flag=False),
        Compat("use_tqdm_on_load", (True,), "the bar shows itself on a terminal only", flag=False),
        Compat("disable_log_stats", (True, False), "statistics are logged by the HTTP server only", flag=False),
        Compat("enable_log_requests", (False,), "requests are logged by the HTTP server only", flag=False),
    )
}

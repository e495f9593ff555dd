"""Engines over FakeBackend, for tests of everything above the engine. Run as a program, it is an engine process.

The model's name says how it behaves: "fake" spells the alphabet (after z it ends), "fake:slow" takes its time,
"fake:endless" too, for minutes, "fake:crash" fails in its third step, "fake:exit" ends the process there, "fake:hang"
never comes back from it, "fake:held@FILE" generates as long as a sequence has at most as many tokens as the file says,
"fake:config" and "fake:bug" do not start. "fake:say" answers what the first message has
between [[ and ]], "fake:steps" the part of that, parted by ||, whose number is that of the results of tools before it,
"fake:harmony" what "fake:say" answers, as a model of the family with that format. "fake:script@FILE" plays written
answers (see Script).
"fake:pool-KIND" is a pooling model of a kind (see fake_pooling).
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from fakes import FakeBackend, FakeTracer, full_layout
from support.checkpoints.byte_text import EOS, byte_tokenizer
from support.engines.fake_pooling import INFOS, fake_pooling_core

from pagoda.common.config.defaults import ModelLimits, Platform, resolve_limits
from pagoda.common.config.engine import EngineConfig
from pagoda.common.engine.core import Sleeper, generation_core
from pagoda.common.engine.steps.profiling import StepProfiler
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.engine.structured_output.grammar import vocabulary_of
from pagoda.common.errors import ConfigError
from pagoda.common.models.registry import family
from pagoda.server.core_client.ipc_messages import EngineInfo
from pagoda.server.startup.engine import BuiltEngine

MAX_LEN = 64

WIDTH = 4
"""Numbers in an embedding, of which the first is the token that it stands for."""

CRASH_AT: int | None = 3
"""The step in which "fake:crash" fails."""
MAX_LENS = {
    **{"say": 1024, "steps": 4096, "harmony": 1024, "endless": 65_536, "held": 65_536},
    "script": 262_144,
}


def build(config: EngineConfig, usage: str = "llm") -> BuiltEngine:
    """An engine whose backend is fake; reads nothing from disk."""
    kind = config.model.model.partition(":")[2]
    if kind == "config":
        raise ConfigError("--dtype", "not today; use another")
    if kind == "bug":
        raise KeyError("a bug")
    layout = full_layout(4)
    max_len = MAX_LENS.get(kind.partition("@")[0], MAX_LEN)
    num_blocks = config.cache.num_gpu_blocks_override or max_len
    backend = FakeBackend(layout, num_blocks=num_blocks, next_token=next_token_of(kind))
    if kind == "crash":
        backend.fail_at = CRASH_AT
    limits = resolve_limits(
        config, platform=Platform("cpu"), usage="llm", block_size=4, model=ModelLimits(max_len)
    ).limits
    info = EngineInfo(
        names=config.model.names,
        limits=limits,
        vocab_size=257,
        eos_token_ids=(EOS,),
        sampling_defaults={"temperature": 0.0},
        backend="fake",
        device="none",
        dtype="float32",
        num_blocks=num_blocks,
        memory="",
        phases=(("pretend", 0.0),),
        embeds_width=WIDTH if config.model.enable_prompt_embeds else 0,
    )
    if kind == "harmony":
        info = msgspec.structs.replace(info, answers=family("GptOssForCausalLM").answers)
    if kind.startswith("pool-"):
        kind = kind.removeprefix("pool-")
        info = msgspec.structs.replace(info, pooling=INFOS[kind], eos_token_ids=())
        return BuiltEngine(fake_pooling_core(kind, limits), backend, info)
    structured = Structured(lambda: vocabulary_of(byte_tokenizer(), 257, (EOS,)))
    core = generation_core(backend, layout, limits, backend.num_blocks, structured=structured)
    if config.extension.profiler is not None:
        core.profiler = StepProfiler(FakeTracer(backend))
    sleeper = Sleeper(backend, core, lambda: [("w", np.zeros(1))]) if config.model.enable_sleep_mode else None
    return BuiltEngine(core, backend, info, sleeper=sleeper, structured=structured)


def next_token_of(kind: str) -> Callable[[list[int]], int]:
    """Return the function from a sequence to its next token."""
    name, _, file = kind.partition("@")
    match name:
        case "held":
            return held(Path(file))
        case "script":
            return played(Path(file))
        case _:
            return NEXT.get(name, alphabet)


def alphabet(history: list[int]) -> int:
    """The next letter; after z, the end."""
    return EOS if history[-1] == ord("z") else (history[-1] + 1) % 256


def slow(history: list[int]) -> int:
    time.sleep(0.01)
    return ord("a") + len(history) % 20


def held(file: Path) -> Callable[[list[int]], int]:
    """The tokens of `slow`, each once the file allows sequences of that length."""

    def next_token(history: list[int]) -> int:
        while len(history) >= int(file.read_text()):
            time.sleep(0.002)
        return ord("a") + len(history) % 20

    return next_token


def allow(file: Path, tokens: int) -> None:
    """Let sequences of `held` grow to so many tokens, prompts included."""
    new = file.with_suffix(".new")
    new.write_text(str(tokens))
    new.rename(file)


LOST = "I was not shown what I need."


class Turn(msgspec.Struct, frozen=True):
    """What the model says if its prompt holds all of `needs`."""

    needs: list[str]
    says: str


class Script(msgspec.Struct, frozen=True):
    """`openings`: what the chat template opens an answer with; the last one in a text is where the answer begins."""

    openings: list[str]
    turns: list[Turn]

    def write(self, file: Path) -> str:
        """Write the script and return the name of the model that plays it."""
        file.write_bytes(msgspec.json.encode(self))
        return f"fake:script@{file}"

    def answer(self, prompt: str) -> str:
        """Return what the model says after a prompt."""
        fitting = [turn.says for turn in self.turns if all(need in prompt for need in turn.needs)]
        return fitting[-1] if fitting else LOST


def played(file: Path) -> Callable[[list[int]], int]:
    """Return the function from a sequence's bytes to the next byte of its answer."""
    script = msgspec.json.decode(file.read_bytes(), type=Script)
    openings = [opening.encode() for opening in script.openings]

    def next_token(history: list[int]) -> int:
        if history[-1] == EOS:  # a step planned ahead, whose token nobody reads
            return EOS
        text = bytes(token for token in history if token != EOS)
        begin = max((text.rfind(opening) + len(opening) for opening in openings if opening in text), default=None)
        if begin is None:  # a chunk of a prompt, or a prompt of another template
            return EOS
        answer = script.answer(text[:begin].decode(errors="replace")).encode()
        said = len(text) - begin
        return answer[said] if said < len(answer) else EOS

    return next_token


def leave(history: list[int]) -> int:
    if history[-1] == ord("d"):
        os._exit(7)
    return alphabet(history)


def hang(history: list[int]) -> int:
    if history[-1] == ord("d"):
        time.sleep(3600)
    return alphabet(history)


def say(history: list[int]) -> int:
    """The next byte of what the prompt gives to say. It ends with `assistant:`, or that, a tag and \\x1f."""
    if history[-1] == EOS:  # a step planned ahead, whose token nobody reads
        return EOS
    text = b"".join(b"<eos>" if token == EOS else bytes([token]) for token in history)
    found = _SCRIPT.search(text)
    assert found is not None, "the prompt has nothing between [[ and ]]"
    said = len(text) - found.end()
    return found[1][said] if said < len(found[1]) else EOS


def say_steps(history: list[int]) -> int:
    """The next byte of the part of what `say` says that belongs to this round of tools."""
    if history[-1] == EOS:
        return EOS
    text = b"".join(b"<eos>" if token == EOS else bytes([token]) for token in history)
    found = _SCRIPT.search(text)
    assert found is not None, "the prompt has nothing between [[ and ]]"
    parts = found[1].split(b"||")
    part = parts[min(text[: found.end()].count(b";tool: "), len(parts) - 1)]
    said = len(text) - found.end()
    return part[said] if said < len(part) else EOS


_SCRIPT = re.compile(rb"\[\[(.*?)\]\].*?assistant:(?! )(?:</?think>\x1f)?", re.DOTALL)

NEXT: dict[str, Callable[[list[int]], int]] = {
    "slow": slow,
    "endless": slow,
    "exit": leave,
    "hang": hang,
    "say": say,
    "steps": say_steps,
    "harmony": say,
}

PROGRAM = (sys.executable, "-P", __file__)


if __name__ == "__main__":
    from pagoda.server.core_client import engine

    os._exit(engine.serve(sys.argv[1], build, int(sys.argv[2]) if len(sys.argv) > 2 else 0))

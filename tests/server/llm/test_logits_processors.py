"""Logits processors of vLLM's interface, in an engine with a tiny random model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import tiny_folder

from pagoda import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.sampling.state import SamplingState
from pagoda.common.errors import ConfigError, RequestError
from pagoda.server.vllm.logits_processors import LogitsBatch
from pagoda.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from pagoda.v1.sample.logits_processor.builtin import process_dict_updates

TINY = tiny_folder.CONFIG | {"vocab_size": 96, "eos_token_id": 2}


class OnlyToken(LogitsProcessor):
    """Leaves one token: extra_args["target"]. The form of vLLM's example."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        target = (params.extra_args or {}).get("target")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target {target!r} is not an integer")

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.scheduler_config.max_num_seqs >= 1
        assert device.type == "cpu"
        assert not is_pin_memory
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.targets, batch_update, lambda params, _, __: (params.extra_args or {}).get("target"))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, target in self.targets.items():
            if target == 13:
                raise OSError("bad luck")
            kept = logits[row, target].clone()
            logits[row] = -torch.inf
            logits[row, target] = kept
        return logits


class Alternate(AdapterLogitsProcessor):
    """Alternates between two tokens by how many there are: reads the growing list of output ids."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        pair = (params.extra_args or {}).get("pair")
        if pair is None:
            return None

        def edit(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            edited = torch.full_like(logits, -torch.inf)
            edited[pair[len(output_ids) % 2] + len(prompt_ids)] = 0.0
            return edited

        return edit


class FailsAlone:
    """Of pagoda's own interface."""

    def __init__(self, config: Any) -> None:
        pass

    def apply(self, logits: Any, token_ids: Any, num_prompt: int, extra_args: Any) -> None:
        if extra_args.get("fail"):
            raise KeyError("gone")


class Third(LogitsProcessor):
    """Argmax-invariant: allows only logits within a third of the best one's, at temperature 1."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.seen: list[float] = []

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(logits < logits.max(-1, keepdim=True).values - 1, -torch.inf)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


@pytest.fixture
def make(folder: Path) -> Iterator[Any]:
    engines = []

    def start(*processors: Any) -> LLM:
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            backend="reference",
            max_model_len=64,
            max_num_seqs=4,
            logits_processors=processors,
        )
        engines.append(llm)
        return llm

    yield start
    for llm in engines:
        llm.shutdown()


def greedy(**extra: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False, extra_args=extra or None)


def tokens(llm: LLM, *params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate([[5, 6, 7 + index] for index in range(len(params))], list(params), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.setting("--logits-processors")
def test_rows_of_a_batch_are_edited(make: Any) -> None:
    """More requests than the engine runs at once, of several lengths, so that rows come, go and move."""
    llm = make(OnlyToken, Alternate)
    params = [greedy(target=40), greedy(), greedy(pair=[10, 20]), greedy(target=50), greedy(), greedy(target=60)]
    for index, each in enumerate(params):
        each.max_tokens = 3 + index % 3
    plain = [SamplingParams(**{**vars(each), "extra_args": None}) for each in params]
    unedited = tokens(make(), *plain)
    edited = tokens(llm, *params)
    assert edited[0] == [40] * 3
    assert edited[1] == unedited[1]
    assert edited[2] == [13, 23, 13, 23, 13]  # three prompt tokens more than the pair
    assert edited[3] == [50] * 3
    assert edited[4] == unedited[4]
    assert edited[5] == [60] * 5


@pytest.mark.setting("--logits-processors")
def test_params_are_checked_by_the_processor(make: Any) -> None:
    with pytest.raises(RequestError, match="target 'x' is not an integer"):
        tokens(make(OnlyToken), greedy(target="x"))


@pytest.mark.setting("--logits-processors")
def test_a_failing_processor_fails_its_request(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    llm = make(OnlyToken, FailsAlone)
    outputs = llm.generate([[5], [6]], [greedy(target=13), greedy()], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert "OnlyToken failed" in caplog.text
    assert tokens(llm, greedy(target=40), greedy())[0] == [40] * 6  # the next requests are served
    outputs = llm.generate([[5], [6]], [greedy(fail=True), greedy(target=40)], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert outputs[1].outputs[0].token_ids == [40] * 6


def test_a_server_names_the_failure(folder: Path) -> None:
    args = AsyncEngineArgs(
        folder, skip_tokenizer_init=True, load_format="dummy", backend="reference", logits_processors=[OnlyToken]
    )
    llm = AsyncLLM(args.create_engine_config(), in_process=True)

    async def last(name: str, params: SamplingParams) -> list[int]:
        return [output async for output in llm.generate([5, 6], params, name)][-1].outputs[0].token_ids

    async def both() -> list[int]:
        with pytest.raises(RequestError, match=r"extra_args.*OnlyToken failed: OSError\('bad luck'\)|OnlyToken failed"):
            await last("a", greedy(target=13))
        return await last("b", greedy(target=40))

    try:
        assert asyncio.run(both()) == [40] * 6
    finally:
        llm.shutdown()


@pytest.mark.setting("--logits-processors")
def test_jax_refuses_them_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--logits-processors: jax_tpu keeps logits on the device"):
        LLM(folder, skip_tokenizer_init=True, load_format="dummy", backend="jax_tpu", logits_processors=[OnlyToken])


class Recorder(Third):
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.update = batch_update


def test_what_a_processor_is_told() -> None:
    made: list[Recorder] = []

    def make_recorder() -> Recorder:
        made.append(Recorder(None, None, False))
        return made[-1]

    batch = LogitsBatch({"r": make_recorder}, lambda rules: rules.extra_args)
    states = {name: SamplingState(SamplingRules(extra_args={"n": name}), [1, 2]) for name in "abcd"}

    def step(names: str, grown: int) -> BatchUpdate | None:
        sequences = [(states[name], [1, 2, *range(grown)]) for name in names]
        batch.apply(torch.zeros(len(names), 3), sequences)
        return made[0].update

    first = step("abc", 0)
    assert first is not None
    assert [(index, params["n"], prompt) for index, params, prompt, _ in first.added] == [
        (0, "a", [1, 2]),
        (1, "b", [1, 2]),
        (2, "c", [1, 2]),
    ]
    output_of_c = first.added[2][3]
    assert step("cba", 1) is None  # only the order of the step's rows changed
    assert output_of_c == [0]
    assert step("bcd", 2).added[0][:2] == (0, {"n": "d"})  # type: ignore[union-attr]
    last = step("c", 3)
    assert last is not None
    assert (last.batch_size, last.removed) == (1, [0, 1])
    assert last.moved == [(2, 0, MoveDirectionality.UNIDIRECTIONAL)]
    assert output_of_c == [0, 1, 2]


class Fails(LogitsProcessor):
    """Fails once it is applied."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None: ...
    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None: ...
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        raise OSError("bad luck")


class KnowsSequences(Fails):
    """Raises if `update_state` did not report every sequence of the batch."""

    told = 0

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.told += len(batch_update.added) if batch_update else 0

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert self.told == len(logits)
        return logits


def test_a_failure_concerns_who_uses_processors_and_names_the_first_that_failed() -> None:
    makers = {"fails": lambda: Fails(None, None, False), "knows": lambda: KnowsSequences(None, None, False)}
    batch = LogitsBatch(makers, lambda rules: None)
    states = [SamplingState(SamplingRules(extra_args=extra), []) for extra in (None, {"a": 1}, None)]
    logits = torch.zeros(3, 5)
    for _ in range(2):
        edited, failed = batch.apply(logits, [(state, []) for state in states])
        assert list(failed) == [1]
        assert "logits processor fails failed: OSError('bad luck')" in failed[1]
        assert batch.apply_scaled(edited, torch.ones(3, 1)) == (logits, {})


def test_processors_of_one_kind_cost_one_pass() -> None:
    batch = LogitsBatch({"fails": lambda: Fails(None, None, False)}, lambda rules: None)
    assert not batch.edits_scaled
    assert LogitsBatch({"knows": lambda: KnowsSequences(None, None, False)}, lambda rules: None).edits_scaled


def test_argmax_invariant_processors_get_logits_after_temperature() -> None:
    batch = LogitsBatch({"third": lambda: Third(None, None, False)}, lambda rules: None)
    states = [SamplingState(SamplingRules(), []) for _ in range(2)]
    logits = torch.tensor([[4.0, 2.5, 0.0], [4.0, 2.5, 0.0]])
    edited, failed = batch.apply(logits, [(state, []) for state in states])
    assert not failed
    assert edited is logits
    edited, failed = batch.apply_scaled(logits, torch.tensor([[1.0], [2.0]]))
    assert not failed
    assert edited.tolist() == [[4.0, -torch.inf, -torch.inf], [4.0, 2.5, -torch.inf]]


def test_dictionaries_follow_the_batch() -> None:
    entries = {0: "a", 1: "b", 2: "c"}
    swap = BatchUpdate(3, [], [], [(0, 2, MoveDirectionality.SWAP)])
    assert process_dict_updates(entries, swap, lambda *_: None)
    assert entries == {0: "c", 1: "b", 2: "a"}
    update = BatchUpdate(2, [1], [(0, "d", None, [])], [(2, 1, MoveDirectionality.UNIDIRECTIONAL)])
    assert process_dict_updates(entries, update, lambda params, _, __: params)
    assert entries == {0: "d", 1: "a"}
    assert not process_dict_updates(entries, None, lambda *_: None)

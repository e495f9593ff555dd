"""Sleep mode of torch_cuda from LLM down to its memory, on one rank and on two, with CPU tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints.tiny_folder import write_model

from pagoda.common.errors import ConfigError, SleepError
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.weights.sharded import Manifest
from pagoda.server.llm import LLM
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.startup.engine import check_engine

PROMPT = {"prompt_token_ids": [5, 17, 3, 80, 41, 2, 9] * 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def cpus_stand_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_are_the_same_after_every_kind_of_sleep(tmp_path: Path, ranks: int) -> None:
    folder = write_model(tmp_path / "tiny")
    llm = LLM(
        str(folder),
        backend="torch_cuda",
        dtype="float32",
        tensor_parallel_size=ranks,
        enable_sleep_mode=True,
        max_model_len=48,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        block_size=16,
    )

    def ask() -> tuple[list[int], int]:
        (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    try:
        want = ask()[0]
        assert ask() == (want, 16), "from the prefix cache"
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert ask() == (want, 0), "which a sleep forgets"
        moved = folder.rename(tmp_path / "moved")
        llm.sleep(level=2)
        with pytest.raises(SleepError, match=r"weights cannot wake up: .*tiny"):
            llm.wake_up()
        moved.rename(folder)
        llm.wake_up()
        assert ask() == (want, 0)
    finally:
        llm.shutdown()


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"nnodes": 2}, "several hosts"), ({"load_format": "sharded_state"}, "a converted checkpoint")],
)
def test_jax_tpu_refuses_sleep_where_it_could_not_wake_up(tmp_path: Path, settings: dict, text: str) -> None:
    folder = write_model(tmp_path / "tiny")
    if "load_format" in settings:
        manifest = Manifest(pagoda="1", architectures=(), dtype="bfloat16", tensor_parallel_size=1, leaves={})
        manifest.write(folder)
    args = EngineArgs(str(folder), backend="jax_tpu", enable_sleep_mode=True, max_model_len=48, **settings)
    with pytest.raises(ConfigError, match=f"--enable-sleep-mode: .*{text}"):
        check_engine(args.create_engine_config(), "llm")

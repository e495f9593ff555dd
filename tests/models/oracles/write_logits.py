"""Write the logits of transformers that the parity tests compare with.

    PYTHONPATH=.. python tests/models/oracles/write_logits.py [CASE ...]

With names of cases, only those are written anew.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import transformers
from models.cases import tiny
from models.oracles.kept_logits import FOLDER, GREEDY, POSITIONS, Draw, Kept, read_cases, read_logits
from safetensors.torch import save_file

SEEDS = {"gemma3n": 1, "ling3": 9}
"""Cases whose values are drawn otherwise, because float32 rounds the first ones too much."""


def draws_of(tensors: dict[str, torch.Tensor]) -> dict[str, Draw]:
    """Return how to draw tensors with about these means and deviations."""
    return {name: _draw(name, tensor) for name, tensor in tensors.items()}


def _draw(name: str, tensor: torch.Tensor) -> Draw:
    assert tensor.dtype == torch.float32, f"{name} is {tensor.dtype}"
    mean, std = (float(f"{value:.2g}") for value in (tensor.mean(), tensor.std(correction=0)))
    return Draw(tuple(tensor.shape), 0.0 if abs(mean) < std / 5 else mean, std)


def with_tensors(case: tiny.Tiny, tensors: dict[str, torch.Tensor], folder: Path) -> transformers.PreTrainedModel:
    """Return the model with these tensors, whose folder has its configuration."""
    model = case.build()
    state = tensors if case.assemble is not None else _as_loaded(case, tensors, folder)
    computed = tiny.computed_buffers(model)
    state = {name: tensor for name, tensor in state.items() if name not in computed}
    missing, more = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if model.config.get_text_config().tie_word_embeddings else set()
    assert not more, (case.name, more)
    assert set(missing) <= computed | tied, (case.name, missing)
    return model


def _as_loaded(case: tiny.Tiny, tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """Return the state that transformers makes of a checkpoint's tensors."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kind = getattr(transformers, case.oracle or case.architecture)
    model, report = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert report["missing_keys"] <= tiny.computed_buffers(model), (case.name, report)
    return model.state_dict()


def keep(case: tiny.Tiny) -> tuple[Kept, np.ndarray]:
    """Return the case and its logits, both from transformers."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        tensors = case.oracle_tensors(folder)
        rename = None if case.rename is None else case.rename.__name__
        config = case.config_of(folder)
        del config["transformers_version"]
        kept = Kept(case.name, config, draws_of(tensors), tiny.tokens(), rename, case.names_only)
        kept = replace(kept, seed=SEEDS.get(case.name, 0))
        model = with_tensors(case, kept.tensors, folder)
        for rest in range(GREEDY, 0, -1):
            whole = [*kept.token_ids, *[0] * rest]  # at its full length, on which frequencies may depend
            kept.token_ids.append(int(tiny.logits(model, whole)[-rest - 1].argmax()))
        return kept, tiny.logits(model, kept.token_ids)[list(POSITIONS)].numpy()


def write(names: list[str]) -> None:
    """Write the data of these cases, or of all; keep that of the others, in the order of `tiny.TINY`."""
    whole = {case.name: case for case in tiny.TINY}
    cases = read_cases() if names else {}
    logits = {name: rows.numpy() for name, rows in read_logits().items()} if names else {}
    for name in names or whole:
        cases[name], logits[name] = keep(whole[name])
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "cases.jsonl").write_text("".join(cases[name].line() + "\n" for name in whole))
    np.savez_compressed(FOLDER / "logits.npz", **{name: logits[name] for name in whole})


if __name__ == "__main__":
    write(sys.argv[1:])

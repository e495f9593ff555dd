"""Model families of other packages: installed ones by entry point, others by `ModelRegistry`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.checkpoints.tiny_folder import CONFIG, write_model
from support.servers.served import environment

import pagoda
from pagoda import ModelRegistry
from pagoda.common.config.groups.nested.pooler import PoolerConfig
from pagoda.common.errors import ModelError
from pagoda.common.models.families.llama_block import LLAMA
from pagoda.common.models.registry import find, pooling_spec, spec_from_config

GUIDE = Path(pagoda.__file__).parent / "docs" / "guides" / "plugins.md"
PEBBLE = {**CONFIG, "architectures": ["PebbleForCausalLM"], "embedding_factor": 3.0}


@pytest.fixture(autouse=True)
def _only_the_tests_families(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ModelRegistry, "_families", {})
    yield
    sys.modules.pop("pebble", None)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path with the installed package of the guide."""
    text = GUIDE.read_text().partition("## A model")[2]
    (module,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (points,) = re.findall(r"```toml\n.*?\n\[project.entry-points.\"(.*?)\"\]\n(.*?)```", text, re.DOTALL)
    (tmp_path / "pebble.py").write_text(module)
    info = tmp_path / "pebble-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pebble\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{points[0]}]\n{points[1].replace(chr(34), '')}")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_guides_model_is_found_by_its_entry_point(site: Path) -> None:
    spec, _ = spec_from_config(PEBBLE)
    assert spec.embedding.scale == 3.0
    assert spec.layers[0].attention.qkv_bias
    assert "PebbleForCausalLM" in ModelRegistry.get_supported_archs()
    pooling, _ = pooling_spec({**PEBBLE, "architectures": ["PebbleModel"]}, "embed", None, PoolerConfig())
    assert pooling.pooler is not None


SCRIPT = """
import json, sys
from pagoda import LLM, SamplingParams

for folder in sys.argv[1:]:
    llm = LLM(folder, backend="reference", max_model_len=64, dtype="float32")
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(temperature=0, max_tokens=8))
    print(json.dumps(output.outputs[0].token_ids))
    del llm
"""


def test_an_engine_in_its_own_process_serves_it(site: Path, tmp_path: Path) -> None:
    """The same weights as a Qwen2, whose block the guide's model has without a factor, give the same tokens."""
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    pebble = {"architectures": ["PebbleForCausalLM"], "model_type": "pebble", "embedding_factor": 0.5}
    theirs, ours = write_model(tmp_path / "qwen2", **qwen), write_model(tmp_path / "pebble", **{**qwen, **pebble})
    tensors = load_file(theirs / "model.safetensors")
    named = {_pebble_name(name): values for name, values in tensors.items()}
    save_file({**named, "tokens.weight": 2 * named["tokens.weight"]}, ours / "model.safetensors")
    command = (sys.executable, "-P", "-c", SCRIPT, str(theirs), str(ours))
    env = {**environment(), "PYTHONPATH": f"{site}:{Path(pagoda.__file__).parents[1]}"}
    printed = subprocess.run(command, capture_output=True, text=True, env=env, timeout=400, check=False)
    assert printed.returncode == 0, printed.stderr
    first, second = printed.stdout.splitlines()
    assert json.loads(first) == json.loads(second)
    assert len(set(json.loads(first))) > 2


def _pebble_name(name: str) -> str:
    for old, new in (
        *(("model.", ""), ("layers.", "blocks."), ("embed_tokens", "tokens"), ("lm_head", "out")),
        *(("input_layernorm", "norm1"), ("post_attention_layernorm", "norm2")),
        *(("self_attn.", ""), ("mlp.", ""), ("_proj", "")),
    ):
        name = name.replace(old, new)
    return name


def test_a_registered_family_takes_precedence(site: Path) -> None:
    ModelRegistry.register_model("PebbleForCausalLM", LLAMA)
    assert find("PebbleForCausalLM") == (LLAMA, None)
    ModelRegistry.register_model("MistralForCausalLM", "pebble:PEBBLE")
    assert find("MistralForCausalLM")[0].rules[0].source == "tokens.weight"
    assert find("MistralForSequenceClassification")[1] == "classify"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:X", "no_such_module:X of pagoda.models cannot be imported: ModuleNotFoundError"),
        ("pebble:NONE", "cannot be imported: AttributeError"),
        ("pebble:Rename", "pebble:Rename is not a Family, it is type"),
    ],
)
def test_a_broken_family_is_named(site: Path, name: str, words: str) -> None:
    ModelRegistry.register_model("PebbleForCausalLM", name)
    with pytest.raises(ModelError, match=f"architecture PebbleForCausalLM: .*{words}"):
        spec_from_config(PEBBLE)


@pytest.mark.parametrize("family", ["pebble.PEBBLE", np.zeros(1), object])
def test_only_families_and_their_names_are_registered(family: object) -> None:
    with pytest.raises(ModelError, match="is neither a Family nor a name module:FAMILY"):
        ModelRegistry.register_model("PebbleForCausalLM", family)  # type: ignore[arg-type]

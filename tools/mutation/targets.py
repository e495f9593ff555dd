"""What tools/mutate.py mutates: the engine's core, and what lies around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mutation.mutants import Sources, Target


@dataclass(frozen=True, slots=True)
class Set:
    """Targets that are judged together: of `count` mutants at least `at_least` are caught."""

    name: str
    targets: tuple[Target, ...]
    count: int
    at_least: int


ENGINE: Final = Set(
    "engine",
    (
        Target(
            "scheduler",
            (
                "common/engine/scheduling/scheduler.py",
                "common/engine/scheduling/request.py",
                "common/engine/speculative/proposer.py",
            ),
        ),
        Target("KV manager", ("common/engine/kv_cache/manager.py", "common/engine/kv_cache/spec.py")),
        Target("block pool", ("common/engine/kv_cache/block_pool.py",)),
        Target(
            "hashing",
            (
                "common/engine/kv_cache/manager.py",
                "common/engine/scheduling/request.py",
                "common/engine/media/items.py",
            ),
            ("root_digest", "page_digest", "extend_hashes", "page_bytes", "token_bytes", "overlapping", "media_digest"),
        ),
        Target("rows of media", ("common/engine/media/rows.py", "common/engine/media/step_rows.py")),
        Target("sampling", ("common/engine/sampling/rules.py", "common/engine/sampling/state.py")),
        Target("reference sampler", ("backends/reference/sampling.py",)),
        Target("output processing", ("server/processing/output_processor.py",)),
        Target(
            "parsers",
            (
                "server/parsers/parser.py",
                "server/parsers/output_parser.py",
                "server/parsers/reasoning/formats.py",
                "server/parsers/tool/scanner.py",
                "server/parsers/tool/json_text.py",
                "server/parsers/tool/formats/xml_calls.py",
            ),
        ),
    ),
    count=60,
    at_least=57,
)

BREADTH: Final = Set(
    "breadth",
    (
        Target(
            "Triton kernels",
            (
                "backends/torch_cuda/kernels/*/__init__.py",
                "backends/torch_cuda/kernels/recurrent/*/__init__.py",
                "backends/torch_cuda/kernels/recurrent/state_step.py",
                "backends/torch_cuda/kernels/linear/weight_only/packing.py",
                "backends/torch_cuda/kernels/frame/launch.py",
                "backends/torch_cuda/kernels/attention/work_list.py",
            ),
        ),
        Target(
            "Pallas kernels",
            (
                "kernels_pallas/*/__init__.py",
                "kernels_pallas/*/inputs.py",
                "kernels_pallas/*/layout.py",
                "kernels_pallas/*/plan.py",
                "kernels_pallas/*/reference.py",
                "kernels_pallas/recurrent_state/batch.py",
                "kernels_pallas/token_selection/marks.py",
                "kernels_pallas/chips.py",
            ),
        ),
        Target(
            "families",
            ("common/models/families/**/*.py", "common/models/hf_config/__init__.py"),
            tests=("tests/models/test_parity.py",),
        ),
        Target("weights", ("common/weights/*.py", "common/weights/gguf/**/*.py")),
        Target(
            "quantisation",
            ("common/weights/quantization/**/*.py",),
            tests=("tests/backends/contract/test_scheme_support.py",),
        ),
        Target(
            "LoRA",
            (
                "common/weights/lora/*.py",
                "common/engine/lora/*.py",
                "backends/*/model/adapters.py",
                "backends/jax_tpu/model/lora.py",
                "backends/jax_tpu/weights/adapters.py",
            ),
            tests=("tests/backends/contract/test_lora.py",),
        ),
        Target(
            "device drafts",
            (
                "backends/reference/drafting.py",
                "backends/torch_cuda/execution/drafting.py",
                "backends/*/model/drafters.py",
                "backends/torch_decoder/drafters.py",
                "backends/jax_tpu/drafters/*.py",
            ),
            tests=("tests/backends/drafts/test_draft_steps.py", "tests/backends/drafts/test_device_drafts.py"),
        ),
        Target("http", ("server/http/*.py",)),
        Target("request fields", ("server/api/openai/**/*.py",)),
        Target("settings", ("server/settings/*.py", "common/config/**/*.py")),
    ),
    count=60,
    at_least=48,
)

SETS: Final = (ENGINE, BREADTH)


def missing(sources: Sources, targets: Sequence[Target]) -> list[str]:
    """The patterns that match no file, and the functions and tests that do not exist, with the target's name."""
    gone = [
        f"{target.name}: {pattern}"
        for target in targets
        for pattern in target.files
        if not Target(target.name, (pattern,)).paths(sources.root)
    ]
    gone += [
        f"{target.name}: {test}" for target in targets for test in target.tests if not (sources.root / test).is_file()
    ]
    for target in (each for each in targets if each.functions):
        defined = {node.name for path in target.paths(sources.root) for node in sources.file(path).functions}
        gone += [f"{target.name}: function {name}" for name in target.functions if name not in defined]
    return gone


def unknown(sources: Sources, targets: Sequence[Target], equivalent: frozenset[str]) -> list[str]:
    """The descriptions in `equivalent` that describe no mutant."""
    named = {description.partition(".py")[0] + ".py" for description in equivalent}
    known = {
        mutant.name.describe()
        for target in targets
        for path in target.paths(sources.root)
        if path in named
        for mutant in sources.file(path).mutants_in(target.functions)
    }
    return sorted(equivalent - known)

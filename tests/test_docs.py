"""What the documents state is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from pagoda.common.models.registry import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[1]


def test_the_support_table_lists_the_registry() -> None:
    table = (ROOT / "BUILD.md").read_text().partition("## Support table")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", table)) >= set(ARCHITECTURES)
    assert set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", table)) <= set(ARCHITECTURES)


def test_make_targets_named_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ("README.md", "BUILD.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"`make ([\w-]+)`", (ROOT / document).read_text()))
        assert named <= targets, f"{document} names {named - targets}"


def test_files_named_in_the_build_guide_exist() -> None:
    text = (ROOT / "BUILD.md").read_text()
    for name in re.findall(
        r"`((?:tests|common|backends|server|benchmarks|constraints)/[\w/]+(?:\.py|\.txt|/)?)`", text
    ):
        assert (ROOT / name).exists() or (ROOT / f"{name}.py").exists(), name

"""What the documents state is what the code does."""

from __future__ import annotations

import json
import re
import shlex
from itertools import dropwhile
from pathlib import Path

import interface
import pytest

import docs
from pagoda.common.models.registry import ARCHITECTURES
from pagoda.server.settings.flags import FlagParser

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "BUILD.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
]


def test_the_support_table_lists_the_registry() -> None:
    table = (ROOT / "BUILD.md").read_text().partition("## Support table")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", table)) >= set(ARCHITECTURES)
    assert set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", table)) <= set(ARCHITECTURES)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_named_in_the_documents_exist(document: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)`", (ROOT / document).read_text())) <= targets


def test_files_named_in_the_build_guide_exist() -> None:
    text = (ROOT / "BUILD.md").read_text()
    for name in re.findall(
        r"`((?:tests|common|backends|server|benchmarks|constraints)/[\w/]+(?:\.py|\.txt|/)?)`", text
    ):
        assert (ROOT / name).exists() or (ROOT / f"{name}.py").exists(), name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", (ROOT / document).read_text()):
        assert target.startswith("https://") or (ROOT / document).parent.joinpath(target).exists(), target


def test_the_readme_says_how_often_tokens_are_the_same_in_a_batch() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    (name,) = re.findall(r"benchmarks/results/[\w-]+-batch-invariance\.json", text)
    found = json.loads((ROOT / name).read_text())
    same = found["bfloat16"]["greedy"]["same_first_tokens"]
    assert (
        f"{same['16']} of 20 greedy prompts had the same first 16 tokens, {same['64']} of 20 the same first 64" in text
    )
    assert all(number == 20 for kind in found["float32"].values() for number in kind["same_first_tokens"].values())


def test_generated_pages_are_current() -> None:
    stale = [path.name for path, text in docs.pages().items() if not path.is_file() or path.read_text() != text]
    assert stale == [], "run `make docs`"


def test_the_check_says_which_page_is_stale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(docs, "pages", lambda: {page: "new\n"})
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["docs.py", "--check"])
    assert docs.main() == 1
    assert capsys.readouterr().out == "stale: page.md\n"
    assert not page.exists()
    monkeypatch.setattr("sys.argv", ["docs.py"])
    assert docs.main() == 0
    assert page.read_text() == "new\n"
    monkeypatch.setattr("sys.argv", ["docs.py", "--check"])
    assert docs.main() == 0


def command_lines(document: str) -> list[str]:
    """What follows the prompt in the console blocks."""
    blocks = re.findall(r"^```console\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    return [line[2:] for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_command_lines_in_the_documents_are_understood(document: str) -> None:
    for line in command_lines(document):
        words = shlex.split(line.removesuffix(" &"), comments=True)
        words = list(dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=.*", word), words))
        if words[0].rpartition("/")[2] == "pagoda":
            parse(words[1:])


def parse(words: list[str]) -> None:
    known = dict(interface.commands())
    name = " ".join(words[:2]) if words[0] == "bench" else words[0]
    parser: FlagParser = interface.parser_of(known[name])
    rest = words[len(name.split()) :]
    if any(word.startswith("--help") for word in rest):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(rest)
        assert ended.value.code == 0
    else:
        parser.parse_args(rest)

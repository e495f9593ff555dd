"""What the documents state is what the code does."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import dropwhile
from pathlib import Path
from types import SimpleNamespace

import httpx
import interface
import pytest
import site_links
import troubleshooting
from model_support import FALLBACK_ONLY, UNSUPPORTED, family_descriptions
from support.servers.served import REAL, environment, served, wait_ready
from support.suite.rows import each_row

import docs
from pagoda.common.models.registry import ARCHITECTURES, ENCODERS, POOLERS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "BUILD.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
]


def test_the_support_table_lists_the_registry() -> None:
    table = (ROOT / "docs" / "reference" / "models.md").read_text()
    assert set(re.findall(r"`(\w+)`", table)) >= set(ARCHITECTURES)
    named = set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", table))
    assert named - set(ARCHITECTURES) - set(UNSUPPORTED) == set(FALLBACK_ONLY) > {"NanoChatForCausalLM"}
    assert set(UNSUPPORTED) <= named


@each_row("module", sorted({module for module, _ in (*ARCHITECTURES.values(), *ENCODERS.values())}))
def test_the_head_of_a_file_of_families_describes_its_architectures(module: str) -> None:
    tables = (ARCHITECTURES, POOLERS, {f"{stem}Model": row for stem, row in ENCODERS.items()})
    architectures = {name for table in tables for name, row in table.items() if row[0] == module}
    descriptions = family_descriptions(module)
    assert set(descriptions) == architectures
    assert all(about.endswith(".") for about in descriptions.values())


def test_the_reference_of_the_api_lists_the_routes_and_bodies_of_every_package() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    for route in (
        "POST /v1/chat/completions",
        "POST /v1/responses",
        "POST /v1/messages",
        "POST /v2/chat",
        "GET /health",
    ):
        assert f"`{route}`" in page, route
    assert {"ChatCompletionRequest", "ResponsesRequest", "EmbeddingChatRequest"} <= set(interface.bodies())
    declared = {
        f"`{method.upper()} {path.replace(':path', '')}`"
        for file in (ROOT / "server" / "api").rglob("*.py")
        for method, path in re.findall(r"@router\.(get|post|put|delete)\(\s*\"([^\"]+)\"", file.read_text())
    }
    assert len(declared) > 50
    assert [route for route in sorted(declared) if route not in page] == []


def test_every_error_that_is_shown_is_in_the_page_of_troubleshooting() -> None:
    shown = {kind for kind in troubleshooting.error_classes() if kind.__module__.startswith("pagoda.")}
    assert shown == {kind for table in troubleshooting.SECTIONS.values() for kind in table}


def test_fields_and_flags_without_effect_are_folded_behind_those_that_work() -> None:
    api, flags = ((ROOT / "docs" / "reference" / name).read_text() for name in ("api.md", "flags.md"))
    chat = api[api.index("## `ChatCompletionRequest`") :]
    sampling = api[api.index("## Sampling fields") :]
    assert sampling.index("| `temperature` |") < sampling.index("<details") < sampling.index("| `mirostat` | refused |")
    assert chat.index("| `messages` |") < chat.index("<details")
    anchors = re.findall(r'<a id="([\w-]+)"></a>', flags)
    assert len(anchors) == len(set(anchors)) > len(interface.rows("flags"))


def test_every_sampling_field_is_described() -> None:
    api, python = ((ROOT / "docs" / "reference" / name).read_text() for name in ("api.md", "python.md"))
    fields = api[api.index("## Sampling fields") :].partition("<details")[0]
    params = python.partition("\n## SamplingParams\n")[2].partition("\n## ")[0]
    for table in (fields, params):
        rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", table, re.MULTILINE)
        assert len(rows) > 30
        assert [name for name, about in rows if not about.strip()] == []


def test_the_number_of_architectures_is_stated_and_each_has_its_row() -> None:
    listed = set((ROOT / "tests" / "data" / "vllm_text_architectures.txt").read_text().split())
    stated = len(listed & set(ARCHITECTURES)), len(listed)
    texts = {name: (ROOT / name).read_text() for name in ("README.md", "CHANGELOG.md")}
    for name, text in texts.items():
        found = re.search(r"(\d+) of the (\d+) text architectures", text)
        assert found is not None, name
        assert (int(found[1]), int(found[2])) == stated, name
    table = set(re.findall(r"^\| (`.*?`) \|", (ROOT / "docs" / "reference" / "models.md").read_text(), re.MULTILINE))
    rows = set(re.findall(r"`(\w+)`", " ".join(table)))
    assert listed & {*ARCHITECTURES, *FALLBACK_ONLY} <= rows
    assert sorted(listed - rows) == sorted(UNSUPPORTED)


@each_row("document", DOCUMENTS)
def test_make_targets_named_in_the_documents_exist(document: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)`", (ROOT / document).read_text())) <= targets


@each_row("document", DOCUMENTS)
def test_files_named_in_the_documents_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    for name in re.findall(
        r"`((?:tests|common|backends|server|benchmarks|constraints|kernels_pallas)/[\w/]+(?:\.py|\.txt|/)?)`", text
    ):
        assert (ROOT / name).exists() or (ROOT / f"{name}.py").exists(), name


def python_files() -> dict[str, str]:
    """The text of every file of the product, its tests and its tools, by path."""
    folders = ("common", "server", "backends", "kernels_pallas", "benchmarks", "tests", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def test_names_in_the_documents_are_those_of_the_code() -> None:
    """A member beside its class is in the class's file, and a file named alone exists. vLLM's files are not here."""
    files = python_files()
    classes: dict[str, list[str]] = {}
    for text in files.values():
        for name in re.findall(r"^class (\w+)", text, re.MULTILINE):
            classes.setdefault(name, []).append(text)
    stems = {Path(path).name for path in files}
    wrong: list[str] = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        for name, member in re.findall(r"`([A-Z]\w+)\.(\w+)", text):
            if name in classes and not any(re.search(rf"\b{member}\b", source) for source in classes[name]):
                wrong.append(f"{document}: {name}.{member}")
        if document != "docs/guides/coming-from-vllm.md":
            wrong += [f"{document}: {name}" for name in re.findall(r"`(\w+\.py)`", text) if name not in stems]
    assert wrong == []


def test_the_table_of_the_architecture_names_what_is_in_its_files() -> None:
    files = python_files()
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (.*?\?) \| `(.*?)` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 15
    wrong: list[str] = []
    for question, file, answer in rows:
        named = [file, *re.findall(r"`([\w/]+\.py)`", answer)]
        sources = [text for path, text in files.items() if path.endswith(tuple(named))]
        for name in re.findall(r"`([A-Za-z_]\w*)(?:\.(?!py`)\w+)?`", answer):
            is_ours = "_" in name or name[0].isupper()
            if is_ours and not any(re.search(rf"^\s*(class|def|async def) {name}\b", s, re.MULTILINE) for s in sources):
                wrong.append(f"{question} {name}")
    assert wrong == []


@each_row("document", DOCUMENTS)
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


def test_the_site_has_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"[\w/-]+\.md", text[text.index("\nnav:") :])
    pages = [page for page in DOCUMENTS if page.startswith("docs/") and not page.startswith("docs/deploy/")]
    assert sorted(named) == sorted(page.removeprefix("docs/") for page in pages)


def test_links_out_of_the_site_become_names_of_files() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/a.md"))
    text = (
        "[log](../../benchmarks/LOG.md) [deploy](../deploy) [b](b.md) [flags](../reference/flags.md#x) "
        "![c](../images/c.png)"
    )
    assert site_links.on_page_markdown(text, page=page) == (
        "log (`benchmarks/LOG.md`) deploy (`docs/deploy`) [b](b.md) [flags](../reference/flags.md#x) "
        "![c](../images/c.png)"
    )


def test_the_site_shows_the_title_of_a_generated_page_and_pipes_in_tables() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/a.md"))
    text = "<!-- generated by a tool -->\n\n# Title\n\n| a | b |\n|---|---|\n| `x \\| y` | \\| |\n\n`p \\| q`"
    shown = "# Title\n\n| a | b |\n|---|---|\n| `x | y` | \\| |\n\n`p \\| q`"
    assert site_links.on_page_markdown(text, page=page) == shown


@pytest.mark.program("mkdocs", "material")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "heartbeat" in (tmp_path / "site" / "search" / "search_index.json").read_text()


def blocks(document: str, language: str) -> list[str]:
    """The blocks of a language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def command_lines(document: str) -> list[str]:
    """The lines of the blocks that are shell commands alone, and what follows the prompt in the others."""
    prompted = [line for block in blocks(document, "console") for line in block.replace("\\\n", " ").splitlines()]
    plain = [line for block in blocks(document, "sh") for line in block.replace("\\\n", " ").splitlines()]
    return [*plain, *(line[2:] for line in prompted if line.startswith("$ "))]


@each_row("document", DOCUMENTS)
def test_command_lines_in_the_documents_are_understood(document: str) -> None:
    for line in command_lines(document):
        words = shlex.split(line.removesuffix(" &"), comments=True)
        words = list(dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=.*", word), words))
        if words[0].rpartition("/")[2] == "pagoda":
            parse(words[1:])


def parse(words: list[str]) -> None:
    known = dict(interface.commands())
    name = next(name for count in (3, 2, 1) if (name := " ".join(words[:count])) in known)
    parser = interface.parsers()[name]
    rest = words[len(name.split()) :]
    if any(word.startswith("--help") for word in rest):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(rest)
        assert ended.value.code == 0
    else:
        parser.parse_args(rest)


@each_row("document", DOCUMENTS)
def test_installs_name_the_clone_and_an_extra_that_there_is(document: str) -> None:
    """The name on PyPI is another project's; `pagoda[extra]` adds to an installation, as error messages say it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in command_lines(document):
        if "pip install" in line:
            assert not re.search(r"install (-\S+ )*'?pagoda", line), line
            assert set(",".join(re.findall(r"\.\[([\w,-]+)\]", line)).split(",")) <= {*extras, ""}, line


@pytest.mark.model
def test_the_first_example_of_the_readme_runs(model_file: Path) -> None:
    example = blocks("README.md", "python")[0]
    assert example.count(EXAMPLE_MODEL) == 1
    done = subprocess.run(
        [sys.executable, "-c", example.replace(EXAMPLE_MODEL, str(model_file))],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == example.rpartition("# ")[2].strip()


@pytest.mark.model
def test_the_first_request_of_the_readme_is_answered(model_file: Path) -> None:
    lines = command_lines("README.md")
    serve = next(line for line in lines if line.startswith("pagoda serve"))
    assert shlex.split(serve)[2:] == [EXAMPLE_MODEL]
    curl = shlex.split(next(line for line in lines if line.startswith("curl")))
    path, header, body = curl[1].removeprefix("localhost:8000"), curl[3], curl[5]
    with served(str(model_file), program=REAL) as (process, url):
        wait_ready(process)
        answer = httpx.post(url + path, headers=dict([header.split(": ")]), content=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]

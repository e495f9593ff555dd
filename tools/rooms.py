"""Count the product files that name a mixer, a quantisation scheme, a request field or a metric.

    python tools/rooms.py [--list]

What belongs to one kind stands in one place per layer of the system, and everybody else asks a registry. A file names
a kind if the name is an identifier, an imported name or a whole string in it; comments and docstrings do not count.
`tests/repository/test_rooms.py` holds the limits.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from structure import ROOT, Tree

MIXERS: Final = "common/models/mixers/"
MIXER_ROOMS: Final = (
    MIXERS,
    "common/models/families/",
    "backends/reference/model/mixers/",
    "backends/reference/model/naive/",
    "backends/torch_decoder/mixers/",
    "backends/torch_cuda/model/mixers/",
    "backends/jax_tpu/model/mixers/",
    "backends/torch_cuda/attention_backends/",
    "backends/torch_cuda/kernels/",
    "kernels_pallas/",
)
"""Where a mixer's class may be named: specification, families, a room per backend, the definition, its kernels."""

KERNELS: Final = ("backends/torch_cuda/kernels/", "kernels_pallas/")

SCHEMES: Final = ("Float8", "Int8", "Int4", "Mxfp4", "Nvfp4", "Codes4", "Blocks")
"""The members of `Scheme`."""


def names_of(tree: ast.Module) -> set[str]:
    """Return the identifiers, imported names and strings of a module, docstrings apart."""
    nodes = list(ast.walk(tree))
    documented = {id(text) for node in nodes for text in _docstrings(node)}
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                names.add(name)
            case ast.Constant(value=str(text)) if id(node) not in documented:
                names.add(text)
    return names


def _docstrings(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions that are strings on their own: docstrings, and comments on fields."""
    body = getattr(node, "body", None)
    for statement in body if isinstance(body, list) else []:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            yield statement.value


def files_by_name(tree: Tree) -> Mapping[str, set[str]]:
    """Name -> the product files that have it."""
    files: dict[str, set[str]] = defaultdict(set)
    for module, syntax in tree.syntax.items():
        for name in names_of(syntax):
            files[name].add(tree.relative(module))
    return files


def mixers(tree: Tree) -> list[str]:
    """Return the class names in the union `Mixer`, those of its parts included."""
    unions: dict[str, list[str]] = {}
    for module, syntax in tree.syntax.items():
        if tree.relative(module).startswith(MIXERS):
            for node in syntax.body:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
                    (target,) = node.targets
                    unions[ast.unparse(target)] = [part.strip() for part in ast.unparse(node.value).split("|")]
    parts = list(unions["Mixer"])
    while any(part in unions for part in parts):
        parts = [inner for part in parts for inner in unions.get(part, [part])]
    return parts


def outside_rooms(tree: Tree, files: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Mixer -> the files outside its rooms that name it. `files`: name -> the product files that have it."""
    return {
        mixer: [path for path in sorted(files[mixer]) if not path.startswith(MIXER_ROOMS)] for mixer in mixers(tree)
    }


def request_fields() -> list[str]:
    """Return the fields of a chat request that pagoda honours, and those of SamplingParams; no common words."""
    from dataclasses import fields as dataclass_fields

    from pagoda.common.sampling_params import NOT_YET, SamplingParams
    from pagoda.server.api.openai.chat import ChatCompletionRequest
    from pagoda.server.http.body import is_hint, is_unsupported

    fields = ChatCompletionRequest.model_fields
    honoured = [name for name, field in fields.items() if not is_hint(field) and not is_unsupported(field)]
    honoured += [field.name for field in dataclass_fields(SamplingParams) if field.name not in NOT_YET]
    return sorted({name for name in honoured if "_" in name})


def files_of_field(name: str, files: Mapping[str, set[str]]) -> list[str]:
    """Return the files that name a request field, apart from kernels, whose arguments are named after the maths."""
    return [path for path in sorted(files[name]) if not path.startswith(KERNELS)]


def metric_names(files: Mapping[str, set[str]]) -> list[str]:
    """Return the names of metrics: strings that begin with a prefix of ours."""
    return sorted(name for name in files if name.startswith(("vllm:", "pagoda:")) and " " not in name)


def main() -> int:
    """Print the counts; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the files, too")
    args = parser.parse_args()
    tree = Tree(ROOT)
    files = files_by_name(tree)
    for mixer, paths in outside_rooms(tree, files).items():
        print(f"{mixer}: {len(files[mixer])} files, {len(paths)} outside its rooms")
        if args.list:
            print(*(f"    {path}" for path in paths), sep="\n")
    fields = request_fields()
    counted = {**files, **{name: files_of_field(name, files) for name in fields}}
    for kind, names in (("scheme", SCHEMES), ("field", fields), ("metric", metric_names(files))):
        rows = sorted(((len(counted[name]), name) for name in names), reverse=True)[:12]
        print(f"{kind}s in most files: {', '.join(f'{name} {count}' for count, name in rows)}")
        if args.list:
            for _, name in rows[:4]:
                print(f"  {name}: {', '.join(sorted(counted[name]))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Rules of the source that no linter knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

import pytest
from repository import ROOT, Source, shipped, written

# Each reads objects or code out of bytes; nothing near input may.
DESERIALISERS = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle"})
DESERIALISING_CALLS = frozenset(
    {
        "eval",
        "exec",
        "torch.load",
        "yaml.load",
        "numpy.load",
        "np.load",
        "broadcast_object_list",
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
    }
)
VAGUE_NAMES = re.compile(r"(Manager|Handler|Helper|Base|Impl|Utils?)$")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b|pragma: no cover")
NAMES_WITH_A_REASON = frozenset({"PoolManager"})  # the pool is managed, and operators call it so


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name or attribute, else the empty string."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{dotted(value)}.{attr}".lstrip(".")
    return ""


def deserialisers(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module)):
                modules = [module]
            case ast.Call(func=func):
                called = dotted(func)
                if called in DESERIALISING_CALLS or called.split(".")[-1] in DESERIALISING_CALLS - {"eval", "exec"}:
                    yield f"{source.at(node)} calls {called}"
                continue
            case _:
                continue
        yield from (f"{source.at(node)} imports {m}" for m in modules if m.split(".")[0] in DESERIALISERS)


def vague_names(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and VAGUE_NAMES.search(node.name) and node.name not in NAMES_WITH_A_REASON:
            yield f"{source.at(node)} class {node.name}"


def without_docstring(source: Source) -> Iterator[str]:
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield source.path


def without_all(source: Source) -> Iterator[str]:
    """Modules that name things and do not say which are public; dunder modules name none."""
    names = source.path.rsplit("/", 1)[-1]
    if names in {"__about__.py", "__main__.py"} or not any(not isinstance(n, ast.Expr) for n in source.tree.body):
        return
    assigned = (target for node in source.tree.body if isinstance(node, ast.Assign) for target in node.targets)
    if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in assigned):
        yield source.path


def public_names_that_are_missing(source: Source) -> Iterator[str]:
    defined = {"__version__"}
    listed: list[str] = []
    for node in source.tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List() as value):
                listed = [element.value for element in value.elts if isinstance(element, ast.Constant)]
            case ast.Assign(targets=targets):
                defined |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                defined.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                defined.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                defined |= {alias.asname or alias.name for alias in names}
    yield from (f"{source.path} lists {name}" for name in listed if name not in defined)


def unfinished(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if UNFINISHED.search(line):
            yield f"{source.path}:{number} {line.strip()[:80]}"


@pytest.mark.parametrize(
    "rule",
    [deserialisers, vague_names, without_docstring, without_all, public_names_that_are_missing, unfinished],
)
def test_every_shipped_module_keeps_the_rule(rule: Callable[[Source], Iterator[str]]) -> None:
    broken = [finding for source in shipped() for finding in rule(source)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (deserialisers, "import pickle"),
        (deserialisers, "from marshal import loads"),
        (deserialisers, "import torch\ntorch.load(f)"),
        (deserialisers, "import torch.distributed as dist\ndist.broadcast_object_list([])"),
        (deserialisers, "eval(text)"),
        (vague_names, "class JobManager: ..."),
        (without_docstring, "x = 1"),
        (without_all, "def f(): ..."),
        (public_names_that_are_missing, "__all__ = ['f']"),
        (unfinished, "# TO" + "DO later"),
    ],
)
def test_each_rule_sees_what_it_forbids(rule: Callable[[Source], Iterator[str]], text: str) -> None:
    assert list(rule(Source("made-up.py", text, ast.parse(text))))


def test_test_files_have_names_of_their_own() -> None:
    """Test modules are imported by name (importlib mode without packages), and reports name them."""
    seen: dict[str, str] = {}
    twice = []
    for source in written():
        name = source.path.rsplit("/", 1)[-1]
        if name.startswith("test_") and "/tests/" in f"/{source.path}":
            if name in seen:
                twice.append((seen[name], source.path))
            seen[name] = source.path
    assert not twice


def test_every_package_ships_its_types_and_its_version() -> None:
    for directory in sorted(ROOT.glob("packages/*/src/*")):
        if (directory / "__init__.py").exists():
            assert (directory / "py.typed").exists(), directory
            assert "__version__" in (directory / "__about__.py").read_text(encoding="utf-8"), directory

"""Every name and keyword that we take from torchrec exists in torchrec 1.6.1 and in the installed version.

Tests run with one version, GPU machines with an older one. Sources are read, not imported: 1.6.1 would not run here.
"""

import ast
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OLDEST = "torchrec==1.6.1"
PACKAGES = ("torchrec", "fbgemm_gpu")
UNKNOWN = object()  # not to be told from the sources: the benefit of the doubt


class Sources:
    """Looks names up in the source files of a package, through re-exports and base classes."""

    def __init__(self, files: dict[str, str]):
        """Take the sources by path, as `torchrec/distributed/types.py`."""
        self._files = files
        self._module = cache(self._load)
        self._packages = {path.split("/")[0] for path in files}

    def _load(self, module: str) -> tuple[str, ast.Module] | None:
        """The package that relative imports in the module start from, and its syntax tree."""
        path = module.replace(".", "/")
        if f"{path}/__init__.py" in self._files:
            return module, ast.parse(self._files[f"{path}/__init__.py"])
        if f"{path}.py" in self._files:
            return module.rpartition(".")[0], ast.parse(self._files[f"{path}.py"])
        return None

    def find(self, name: str):
        """What the full dotted name stands for: (module, node), UNKNOWN, or None if there is no such thing."""
        if name.split(".")[0] not in self._packages or self._module(name):
            return UNKNOWN
        parent, _, last = name.rpartition(".")
        if not parent:
            return None
        if self._module(parent):
            return self._in_module(parent, last)
        owner = self.find(parent)
        if owner is None or owner is UNKNOWN:
            return owner
        return self._in_class(*owner, last) if isinstance(owner[1], ast.ClassDef) else UNKNOWN

    def _in_module(self, module: str, name: str):
        package, tree = self._module(module)
        stars = []
        for node in statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                source = ".".join(filter(None, [up(package, node.level), node.module]))
                for alias in node.names:
                    if alias.name == "*":
                        stars.append(f"{source}.{name}")
                    elif name == (alias.asname or alias.name):
                        return self.find(f"{source}.{alias.name}")
            elif name in bound_names(node):
                return module, node
        return next((found for found in map(self.find, stars) if found), None)

    def _in_class(self, module: str, node: ast.ClassDef, name: str):
        for member in statements(node.body):
            if name in bound_names(member):
                return module, member
        bases = [self._base(module, base) for base in node.bases]
        found = [self._in_class(*base, name) if isinstance(base, tuple) else base for base in bases]
        return next((f for f in found if f), None)

    def _base(self, module: str, base: ast.expr):
        """A base class; None for those that bring no members of their own."""
        name = ast.unparse(base).split("[")[0]
        if name.split(".")[-1] in ("object", "Enum", "str", "ABC", "Generic", "NamedTuple", "Protocol"):
            return None
        found = self.find(f"{module}.{name}")
        return found if isinstance(found, tuple) and isinstance(found[1], ast.ClassDef) else UNKNOWN

    def keywords(self, name: str) -> set[str] | None:
        """The keywords that calling `name` takes, or None if anything goes or nobody knows."""
        found = self.find(name)
        if not isinstance(found, tuple):
            return None
        module, node = found
        if isinstance(node, ast.ClassDef):
            init = self._in_class(module, node, "__init__")
            if init is UNKNOWN:
                return None
            if init is None:
                return self._fields(module, node)
            node = init[1]
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.args.kwarg:
            return None
        return {arg.arg for arg in [*node.args.args, *node.args.kwonlyargs]}

    def _fields(self, module: str, node: ast.ClassDef) -> set[str] | None:
        """The fields of a dataclass or named tuple and of its bases."""
        fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        for base in node.bases:
            found = self._base(module, base)
            inherited = self._fields(*found) if isinstance(found, tuple) else set()
            if found is UNKNOWN or inherited is None:
                return None
            fields |= inherited
        return fields


def up(package: str, level: int) -> str:
    """What `level` leading dots of a relative import stand for."""
    return ".".join(package.split(".")[: len(package.split(".")) - level + 1]) if level else ""


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body and of the branches in it."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


def bound_names(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {n.id for target in targets if target for n in ast.walk(target) if isinstance(n, ast.Name)}


def falls_back(node: ast.AST) -> bool:
    """Is this a `try` that has something else ready where an import fails?"""
    handlers = node.handlers if isinstance(node, ast.Try) else []
    return any(h.type and "ImportError" in ast.unparse(h.type) for h in handlers)


def uses(tree: ast.Module) -> Iterator[tuple[int, str, list[str]]]:
    """Line, full name and keywords of everything that the code takes from the packages and from their classes."""
    optional = {id(n) for t in ast.walk(tree) if falls_back(t) for s in t.body for n in ast.walk(s)}
    imports = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) and id(n) not in optional]
    names = {}
    for node in imports:
        for alias in node.names:
            name = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            top = name.split(".")[0]
            if top in PACKAGES:
                yield node.lineno, name, []
                bare = isinstance(node, ast.Import) and not alias.asname  # `import a.b` binds a
                names[top if bare else alias.asname or alias.name] = top if bare else name

    def full(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return names.get(node.id)
        base = full(node.value) if isinstance(node, ast.Attribute) else None
        return f"{base}.{node.attr}" if base else None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := full(node)):
            yield node.lineno, name, []
        elif isinstance(node, ast.Call) and (name := full(node.func)):
            yield node.lineno, name, [k.arg for k in node.keywords if k.arg]


def problems(path: str, tree: ast.Module, sources: Sources) -> Iterator[str]:
    for line, name, keywords in uses(tree):
        if sources.find(name) is None:
            yield f"{path}:{line}: {name} does not exist"
        known = sources.keywords(name)
        for keyword in keywords:
            if known is not None and keyword not in known:
                yield f"{path}:{line}: {name} has no parameter {keyword}"


def problems_of_ours(sources: Sources) -> list[str]:
    paths = [*ROOT.glob("recsys/**/*.py"), *ROOT.glob("scripts/**/*.py"), *ROOT.glob("train.py")]
    trees = {str(p.relative_to(ROOT)): ast.parse(p.read_text(encoding="utf-8")) for p in sorted(paths)}
    return [found for path, tree in trees.items() for found in problems(path, tree, sources)]


@pytest.fixture(scope="module")
def oldest(request) -> Sources:
    folder = request.config.cache.mkdir("torchrec-oldest")
    if not list(folder.glob("*.whl")):
        # A few hundred kilobytes. Whoever is offline has the other tests.
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(folder), OLDEST]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            pytest.skip(f"pip could not download {OLDEST}: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Sources({n: wheel.read(n).decode() for n in wheel.namelist() if n.endswith(".py")})


@pytest.fixture(scope="module")
def installed() -> Sources:
    files = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        root = Path(spec.submodule_search_locations[0])
        files |= {f"{package}/{p.relative_to(root)}": p.read_text(encoding="utf-8") for p in root.rglob("*.py")}
    return Sources(files)


def test_ours_fits_the_oldest(oldest):
    found = problems_of_ours(oldest)
    assert not found, "\n".join(found)


def test_ours_fits_the_installed(installed):
    found = problems_of_ours(installed)
    assert not found, "\n".join(found)


def test_oldest_lacks_what_it_is_known_to_lack(oldest):
    name = "torchrec.distributed.planner.storage_reservations.FixedAbsoluteStorageReservation"
    assert oldest.find(name) is None
    assert oldest.find("torchrec.distributed.planner.storage_reservations.FixedPercentageStorageReservation")
    assert "data_type" in oldest.keywords("torchrec.modules.embedding_configs.EmbeddingBagConfig")


PACKAGE = {
    "torchrec/__init__.py": "from torchrec.jagged import Jagged\nfrom .kinds import *\nimport torchrec.jagged",
    "torchrec/jagged.py": """
class Base:
    def __init__(self, keys, *, stride=None): ...
    @classmethod
    def of(cls, keys): ...
class Jagged(Base):
    pass
""",
    "torchrec/kinds/__init__.py": """
from dataclasses import dataclass
from enum import Enum
from torch import nn
from .more import plain, loose
class Kind(Enum):
    ROW = 1
@dataclass
class Spec:
    name: str
@dataclass
class Wide(Spec):
    dim: int = 0
class Net(nn.Module):
    pass
""",
    "torchrec/kinds/more.py": "try:\n    def plain(a, b=1): ...\nfinally:\n    pass\ndef loose(**kwargs): ...",
}

GOOD = [
    "from torchrec import Jagged\nJagged(keys=1, stride=2)\nJagged.of(keys=1)",
    "from torchrec.kinds import Kind as K, Wide\nK.ROW\nWide(name='', dim=1)",
    "from torchrec.kinds import plain, loose, Net\nplain(b=2)\nloose(x=1)\nNet(x=1).x",
    "import torchrec\ntorchrec.kinds.Wide(dim=1)\ntorchrec.Kind.ROW",
    "import torchrec.jagged as j\nj.Jagged",
    "try:\n    from torchrec import New\nexcept ImportError:\n    New = None",
    "from fbgemm_gpu.elsewhere import anything",
]
WRONG = [
    ("from torchrec import Missing", "torchrec.Missing does not exist"),
    ("try:\n    from torchrec import Missing\nfinally:\n    pass", "torchrec.Missing does not exist"),
    ("from torchrec.missing import X", "torchrec.missing.X does not exist"),
    ("import torchrec.missing", "torchrec.missing does not exist"),
    ("import torchrec.jagged as j\nj.Missing", "torchrec.jagged.Missing does not exist"),
    ("from torchrec import Kind\nKind.COLUMN", "torchrec.Kind.COLUMN does not exist"),
    ("from torchrec import Jagged\nJagged(lengths=1)", "torchrec.Jagged has no parameter lengths"),
    ("from torchrec import Jagged\nJagged.of(stride=1)", "torchrec.Jagged.of has no parameter stride"),
    ("from torchrec.kinds import Wide\nWide(rows=1)", "torchrec.kinds.Wide has no parameter rows"),
    ("from torchrec import plain as p\np(c=1)", "torchrec.plain has no parameter c"),
]


@pytest.mark.parametrize("code", GOOD)
def test_nothing_is_found_in_good_code(code):
    assert not list(problems("x.py", ast.parse(code), Sources(PACKAGE)))


@pytest.mark.parametrize(("code", "said"), WRONG)
def test_what_is_wrong_is_found(code, said):
    assert any(found.endswith(said) for found in problems("x.py", ast.parse(code), Sources(PACKAGE)))

"""What we take from torchrec and FBGEMM exists in 1.6 and in the installed versions and can be called as we do; what we
override is called there as ours can be.

Tests run with one version, GPU machines with an older one. Sources are read, not imported: 1.6.1 would not run here.
"""

import ast
import copy
import importlib.util
import inspect
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from launch import ROOT
from sources import Sources

sys.path.insert(0, str(ROOT / "scripts"))

from requirements import requirements

OLDEST = [pin for pin in requirements("cpu", "oldest") if pin.startswith(("torchrec==", "fbgemm"))]
PACKAGES = ("torchrec", "fbgemm_gpu")
_TRAINING = "fbgemm_gpu.split_table_batched_embeddings_ops_training"
_JAGGED = "torchrec.sparse.jagged_tensor"
HOLDERS = ("recsys/tables", "recsys/step", "recsys/models")
# What variables of these names hold there.
HELD = {
    **dict.fromkeys(["fbgemm", "emb_module"], f"{_TRAINING}.SplitTableBatchedEmbeddingBagsCodegen"),
    "ids": f"{_JAGGED}.KeyedJaggedTensor",
    "jagged": f"{_JAGGED}.JaggedTensor",
    "pooled": f"{_JAGGED}.KeyedTensor",
}


def falls_back(node: ast.AST) -> bool:
    """Is this a `try` that has something else ready where an import fails?"""
    handlers = node.handlers if isinstance(node, ast.Try) else []
    return any(h.type and "ImportError" in ast.unparse(h.type) for h in handlers)


@cache
def imported(tree: ast.Module) -> list[tuple[int, str, str]]:
    """Line, full name and name here of everything that the code imports from the packages."""
    nodes = list(ast.walk(tree))
    optional = {id(n) for t in nodes if falls_back(t) for s in t.body for n in ast.walk(s)}
    found = []
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in optional:
            for alias in node.names:
                name = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                here = alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else "")
                if name.split(".")[0] in PACKAGES:
                    found.append((node.lineno, name, here))
    return found


def full(node: ast.AST, names: dict[str, str]) -> str | None:
    """The full name that an expression stands for, given the full names of those imported."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    base = full(node.value, names) if isinstance(node, ast.Attribute) else None
    return f"{base}.{node.attr}" if base else None


@cache
def names_of(tree: ast.Module) -> dict[str, str]:
    """Full names by the names here; `import a.b` binds a."""
    return {here or name.split(".")[0]: name if here else name.split(".")[0] for _, name, here in imported(tree)}


def uses(tree: ast.Module) -> Iterator[tuple[int, str, ast.Call | None]]:
    """Line, full name and call of everything that the code takes from the packages and from their classes."""
    names = names_of(tree)
    yield from ((line, name, None) for line, name, _ in imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := full(node, names)):
            yield node.lineno, name, None
        elif isinstance(node, ast.Call) and (name := full(node.func, names)):
            yield node.lineno, name, node


def problems(path: str, tree: ast.Module, sources: Sources) -> Iterator[str]:
    for line, name, call in uses(tree):
        if sources.find(name) is None:
            yield f"{path}:{line}: {name} does not exist"
        known = sources.keywords(name)
        wrong = [k.arg for k in call.keywords if k.arg and k.arg not in known] if call and known is not None else []
        yield from (f"{path}:{line}: {name} has no parameter {keyword}" for keyword in wrong)
        function, is_bound = sources.function(name)
        if call and function and not wrong and not binds(call, function, is_bound):
            yield f"{path}:{line}: {name} is not called as {ast.unparse(call)}"


def problems_of_objects(path: str, tree: ast.Module, sources: Sources) -> Iterator[str]:
    """Methods called on what `HELD` names that do not exist or are not called so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            kind = HELD.get(getattr(owner, "id", getattr(owner, "attr", "")))
            found = sources.find(f"{kind}.{node.func.attr}")
            if kind and (found is None or (isinstance(found, tuple) and not binds(node, found[1]))):
                yield f"{path}:{node.lineno}: {kind} is not called as {ast.unparse(node)}"


def overrides(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Methods of classes that extend one of the packages, each with the full name that it has there if it overrides."""
    names = names_of(tree)
    for node in ast.walk(tree):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            if name := full(base.value if isinstance(base, ast.Subscript) else base, names):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and not method.name.startswith("__"):
                        yield f"{name}.{method.name}", method


def signature(function: ast.FunctionDef) -> inspect.Signature:
    """What a function takes, without types and with None for defaults."""
    given = copy.deepcopy(function.args)
    for arg in ast.walk(given):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    given.defaults = [ast.Constant(None) for _ in given.defaults]
    given.kw_defaults = [each and ast.Constant(None) for each in given.kw_defaults]
    code = ast.fix_missing_locations(ast.Expression(ast.Lambda(given, ast.Constant(None))))
    return inspect.signature(eval(compile(code, "", "eval")))


def binds(call: ast.Call, function: ast.AST, is_bound: bool = True) -> bool:
    """Can a method, or a function that is not bound to an object, be called so?"""
    if not isinstance(function, ast.FunctionDef):
        return True  # an attribute, which may hold a function
    open_ended = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
    bind = signature(function).bind_partial if open_ended else signature(function).bind
    try:
        bind(*([None] * (is_bound + len(call.args))), **{k.arg: None for k in call.keywords if k.arg})
    except TypeError:
        return False
    return True


def problems_of_overrides(path: str, tree: ast.Module, sources: Sources, newer: Sources) -> Iterator[str]:
    """What of `sources` does not fit our overrides: methods that only `newer` has, and calls that ours do not take."""
    for name, ours in overrides(tree):
        there = sources.find(name)
        if there is None and newer.find(name):
            yield f"{path}:{ours.lineno}: {name} does not exist, so that nobody calls ours"
        if not isinstance(there, tuple):
            continue
        for where, call in sources.calls(ours.name, "torchrec/distributed/"):
            if binds(call, there[1]) and not binds(call, ours):  # else it calls something else of this name
                yield f"{path}:{ours.lineno}: {name} is called as {ast.unparse(call)} in {where}"


@cache
def trees_of_ours() -> list[tuple[str, ast.Module]]:
    """Path and syntax tree of each of our files that names one of the packages, or may hold its objects."""
    paths = sorted([*ROOT.glob("recsys/**/*.py"), *ROOT.glob("scripts/**/*.py"), *ROOT.glob("train.py")])
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    used = [path for path, text in texts.items() if path.startswith(HOLDERS) or any(name in text for name in PACKAGES)]
    return [(path, ast.parse(texts[path])) for path in used]


def problems_of_ours(sources: Sources, newer: Sources) -> list[str]:
    found = []
    for path, tree in trees_of_ours():
        found += [*problems(path, tree, sources), *problems_of_overrides(path, tree, sources, newer)]
        if path.startswith(HOLDERS):
            found += problems_of_objects(path, tree, sources)
    return found


@pytest.fixture(scope="module")
def oldest(request) -> Sources:
    folder = request.config.cache.mkdir("torchrec-oldest")
    if len(list(folder.glob("*.whl"))) < len(OLDEST):
        # Seven megabytes. Whoever is offline has the other tests. Any Python's wheel has the sources.
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(folder), *OLDEST]
        command += ["--only-binary", ":all:", "--python-version", "3.12"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            pytest.skip(f"pip could not download {OLDEST}: {done.stderr.strip().splitlines()[-1:]}")
    files = {}
    for path in folder.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            files |= {n: wheel.read(n).decode() for n in wheel.namelist() if n.endswith(".py")}
    return Sources(files)


@pytest.fixture(scope="module")
def installed() -> Sources:
    files = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        root = Path(spec.submodule_search_locations[0])
        files |= {f"{package}/{p.relative_to(root)}": p.read_text(encoding="utf-8") for p in root.rglob("*.py")}
    return Sources(files)


@pytest.mark.slow
def test_ours_fits_the_oldest(oldest, installed):
    found = problems_of_ours(oldest, installed)
    assert not found, "\n".join(found)


def test_ours_fits_the_installed(installed):
    found = problems_of_ours(installed, installed)
    assert not found, "\n".join(found)


def test_overrides_are_found():
    found = {name.removeprefix("torchrec.distributed.") for _, tree in trees_of_ours() for name, _ in overrides(tree)}
    assert {"planner.types.ShardEstimator.estimate", "train_pipeline.TrainPipelineSparseDist._backward"} < found


@pytest.mark.parametrize("version", ["oldest", "installed"])
def test_the_pipeline_asks_no_more_of_an_optimizer_than_ours_has(version, request):
    sources = request.getfixturevalue(version)
    _, pipeline = sources.find("torchrec.distributed.train_pipeline.TrainPipelineSparseDist")
    asked = {
        n.attr for n in ast.walk(pipeline) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self._optimizer"
    }
    assert asked == {"zero_grad", "step"}


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
    "from torchrec.kinds import plain, loose, Net\nplain(1, b=2)\nloose(x=1)\nNet(x=1).x",
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
    ("from torchrec import plain\nplain(1, 2, 3)", "torchrec.plain is not called as plain(1, 2, 3)"),
    ("from torchrec import Jagged\nJagged(1, 2)", "torchrec.Jagged is not called as Jagged(1, 2)"),
    ("from torchrec import Jagged\nJagged.of(1, 2)", "torchrec.Jagged.of is not called as Jagged.of(1, 2)"),
]


@pytest.mark.parametrize("code", GOOD)
def test_nothing_is_found_in_good_code(code):
    assert not list(problems("x.py", ast.parse(code), Sources(PACKAGE)))


@pytest.mark.parametrize(("code", "said"), WRONG)
def test_what_is_wrong_is_found(code, said):
    assert any(found.endswith(said) for found in problems("x.py", ast.parse(code), Sources(PACKAGE)))


@pytest.mark.parametrize(("call", "is_wrong"), [("ids.of([])", False), ("x.ids.off()", True), ("ids.of()", True)])
def test_what_objects_do_not_take_is_found(call, is_wrong, monkeypatch):
    monkeypatch.setitem(HELD, "ids", "torchrec.Jagged")
    assert bool(list(problems_of_objects("x.py", ast.parse(call), Sources(PACKAGE)))) is is_wrong


ESTIMATORS = {
    "torchrec/distributed/estimators.py": """
class Base:
    def estimate(self, options, sharders=None, *, quick=False): ...
class Estimator(Base):
    def step(self): ...
def use(estimator, other):
    estimator.estimate([], {})
    estimator.estimate(options=[], quick=True)
    estimator.estimate(*[], **{})
    other.estimate(1, 2, 3)
"""
}
OURS = "from torchrec.distributed import estimators\nclass Ours(estimators.Estimator):\n    def {}: ..."


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("estimate(self, options, *args, **kwargs)", []),
        ("estimate(self, options, sharders=None, quick=True)", []),
        ("of_our_own(self)", []),
        ("step(self)", []),
        ("estimate(self, options, **kwargs)", ["estimate is called as estimator.estimate([], {}) in"]),
        ("estimate(self, chosen, *args, **more)", ["called as estimator.estimate(options=[], quick=True) in"]),
        ("hook(self)", ["torchrec.distributed.estimators.Estimator.hook does not exist, so that nobody calls ours"]),
    ],
)
def test_calls_that_an_override_does_not_take_are_found(method, said):
    newer = {path: text.replace("def step", "def hook(self): ...\n    def step") for path, text in ESTIMATORS.items()}
    tree = ast.parse(OURS.format(method))
    found = list(problems_of_overrides("x.py", tree, Sources(ESTIMATORS), Sources(newer)))
    assert len(found) == len(said) and all(a in b for a, b in zip(said, found, strict=True))

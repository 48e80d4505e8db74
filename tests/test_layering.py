"""The shape of the code, read from its syntax trees: imports go one way, and other promises of the design."""

import ast
import functools
import graphlib
import re
import subprocess
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A room may import from those before it, not from those behind it.
ROOMS = (
    "errors",
    "config",
    "runtime",
    "report",
    "ids",
    "data",
    "tables",
    "models",
    "step",
    "checkpoint",
    "memory",
    "training",
    "serving",
    "datasets",
    "__main__",
)
LONGEST_FILE, LONGEST_FUNCTION = 350, 45
PLACES = {room: place for place, room in enumerate(ROOMS)}

RANK_VARIABLES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_LOCALID",
}


def room_of(path: str) -> str:
    """The room of recsys that the file belongs to; empty for recsys/__init__.py."""
    return path.split("/")[1].removesuffix(".py").replace("__init__", "")


def imported(tree: ast.Module, path: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, wherever it stands in the file."""
    package = path.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def wrong_imports(path: str, tree: ast.Module) -> Iterator[str]:
    room = room_of(path)
    if room and room not in PLACES:
        yield f"{path}: {room} is no room; the rooms are {', '.join(ROOMS)}"
        return
    for line, name in imported(tree, path):
        top, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if top in ("train", "scripts", "tests", "benchmarks"):
            yield f"{path}:{line}: recsys must not import {name}"
        if top != "recsys" or other == room or not rest:
            continue
        if other not in PLACES:
            yield f"{path}:{line}: {name} is of no room; name the module that it comes from"
        elif not room or PLACES[other] > PLACES[room]:
            yield f"{path}:{line}: {room or 'recsys'} must not import {name}"


def environment_reads(path: str, tree: ast.Module) -> Iterator[str]:
    """Only three files of `runtime` read the environment, and errors for the file that torchrun names there."""
    if path in ("recsys/runtime/world.py", "recsys/runtime/launch.py", "recsys/runtime/environment.py"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in RANK_VARIABLES:
            yield f"{path}:{node.lineno}: {node.value} is read by recsys/runtime/world.py and launch.py alone"
        of_name = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        name = f"{node.value.id}.{node.attr}" if of_name else ""
        if name in ("os.environ", "os.getenv") and path != "recsys/errors.py":
            yield f"{path}:{node.lineno}: {name} outside recsys/runtime"
    for line, name in imported(tree, path):
        if name in ("os.environ", "os.getenv"):
            yield f"{path}:{line}: {name} outside recsys/runtime"


def import_effects(path: str, tree: ast.Module) -> Iterator[str]:
    """Statements at module level that do more than name something."""
    harmless = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, (*harmless, ast.Assign, ast.AnnAssign)):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.If) and any(n in ast.unparse(node.test) for n in ("TYPE_CHECKING", "__name__")):
            continue
        yield f"{path}:{node.lineno}: importing the module must have no effect"


def long_functions(path: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > LONGEST_FUNCTION:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines; make a function of a part of it"


def unknown_names(path: str, tree: ast.Module) -> Iterator[str]:
    """What a test sets in a module of recsys that has no such name: nothing is changed by it, and nobody told."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assigned = [target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    for target in assigned:
        for part in getattr(target, "elts", [target]):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                file = ROOT / f"{named.get(part.value.id, '').replace('.', '/')}.py"
                if file.is_relative_to(ROOT / "recsys") and file.is_file() and part.attr not in top_names(file):
                    yield f"{path}:{part.lineno}: {file.relative_to(ROOT)} has no {part.attr}"


@functools.cache
def top_names(file: Path) -> set[str]:
    return {*symtable.symtable(file.read_text(encoding="utf-8"), str(file), "exec").get_identifiers()}


@functools.cache
def sources(*patterns: str) -> dict[str, ast.Module]:
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text(encoding="utf-8")) for p in paths}


@pytest.mark.parametrize("rule", [wrong_imports, environment_reads, import_effects, long_functions])
def test_package(rule):
    problems = [line for path, tree in sources("recsys/**/*.py").items() for line in rule(path, tree)]
    assert not problems, "\n".join(problems)


def test_what_tests_set_is_there():
    sets = re.compile(r"^ +\w+\.\w+(, [\w.]+)* = ", re.MULTILINE)  # to parse all of them takes two seconds
    paths = [path for path in ROOT.glob("tests/**/*.py") if sets.search(path.read_text(encoding="utf-8"))]
    trees = sources(*(str(path.relative_to(ROOT)) for path in paths))
    problems = [line for path, tree in trees.items() for line in unknown_names(path, tree)]
    assert not problems, "\n".join(problems)


def modules() -> dict[str, set[str]]:
    """By module of recsys the modules that it imports when it is imported itself."""
    trees = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree
        for path, tree in sources("recsys/**/*.py").items()
    }
    found: dict[str, set[str]] = {}
    for module, tree in trees.items():
        top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        path = f"{module.replace('.', '/')}.py"
        names = {name for _, name in imported(ast.Module(top, []), path)}
        found[module] = {name if name in trees else name.rpartition(".")[0] for name in names} & trees.keys() - {module}
    return found


def test_no_circle_of_imports():
    graphlib.TopologicalSorter(modules()).prepare()  # raises CycleError, which names the circle


def test_train_reads_no_environment():
    problems = [line for path, tree in sources("train.py").items() for line in environment_reads(path, tree)]
    assert not problems, "\n".join(problems)


def test_files_stay_short():
    folders = [path for folder in ("recsys", "tests", "scripts", "benchmarks") for path in ROOT.glob(f"{folder}/**/*")]
    limits = {path: 400 for path in folders if path.suffix in (".py", ".sh")}
    limits |= dict.fromkeys(ROOT.glob("recsys/**/*.py"), LONGEST_FILE)
    limits |= {path: 100 for path in ROOT.glob("train.py")}
    limits[ROOT / "recsys/serving/score.py"] = 990  # one file that stands alone in every export
    for path, limit in limits.items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= limit, f"{path.relative_to(ROOT)} has {lines} lines, and may have {limit}: split it"


# What each rule must find, so that none of them is true of everything.
CAUGHT = [
    (wrong_imports, "recsys/config/load.py", "from recsys.runtime.world import World"),
    (wrong_imports, "recsys/config/load.py", "from recsys import runtime"),
    (wrong_imports, "recsys/config/load.py", "from ..runtime.world import World"),
    (wrong_imports, "recsys/errors.py", "def f():\n    import recsys.config"),
    (wrong_imports, "recsys/data/loader.py", "from recsys.tables.spec import Shard"),
    (wrong_imports, "recsys/models/metrics.py", "from recsys.checkpoint import save"),
    (wrong_imports, "recsys/step/step.py", "from recsys.training.trainer import Trainer"),
    (wrong_imports, "recsys/tables/shard.py", "import train"),
    (wrong_imports, "recsys/tables/shard.py", "import benchmarks.launcher"),
    (wrong_imports, "recsys/helpers.py", "import os"),
    (wrong_imports, "recsys/__init__.py", "from recsys.training.trainer import fit"),
    (wrong_imports, "recsys/models/dlrm.py", "from recsys import __version__"),
    (environment_reads, "recsys/training/trainer.py", "import os\nx = os.environ.get('HOME')"),
    (environment_reads, "recsys/training/trainer.py", "from os import environ"),
    (environment_reads, "recsys/errors.py", "import os\nx = os.environ['RANK']"),
    (environment_reads, "train.py", "import os\nx = os.getenv('LOCAL_RANK')"),
    (import_effects, "recsys/training/trainer.py", "import torch\ntorch.manual_seed(0)"),
    (import_effects, "recsys/training/trainer.py", "for i in range(3):\n    pass"),
    (unknown_names, "tests/a.py", "def f():\n    from recsys.tables import shard as s\n    s.a, s.local_lookup = 1, 2"),
    (long_functions, "recsys/data/order.py", "class C:\n  def f(self):\n" + LONGEST_FUNCTION * "    pass\n"),
]
ALLOWED = [
    (wrong_imports, "recsys/config/load.py", "from recsys.config.schema import Config\nfrom . import checks"),
    (wrong_imports, "recsys/runtime/versions.py", "from recsys.errors import UserError"),
    (wrong_imports, "recsys/models/dlrm.py", "from recsys.data import Batch\nfrom recsys.tables.spec import x"),
    (wrong_imports, "recsys/training/trainer.py", "from recsys import models\nimport torch.distributed"),
    (environment_reads, "recsys/runtime/world.py", "import os\nx = os.environ['RANK']"),
    (environment_reads, "recsys/errors.py", "import os\nx = os.environ.get('TORCHELASTIC_ERROR_FILE')"),
    (import_effects, "recsys/training/trainer.py", "'''Doc.'''\nX = 1\nif __name__ == '__main__':\n    main()"),
    (unknown_names, "tests/a.py", "from recsys.tables import shard\nshard.local_lookups = shard._place = None"),
    (long_functions, "recsys/data/order.py", "def f():\n" + (LONGEST_FUNCTION - 1) * "    pass\n"),
]


@pytest.mark.parametrize(("rule", "path", "source"), CAUGHT)
def test_rule_finds(rule, path, source):
    assert list(rule(path, ast.parse(source)))


@pytest.mark.parametrize(("rule", "path", "source"), ALLOWED)
def test_rule_allows(rule, path, source):
    assert not list(rule(path, ast.parse(source)))


def test_the_environment_is_set_before_it_is_read():
    code = "import sys, train; sys.exit('pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

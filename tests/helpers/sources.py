"""Sources of packages, read without importing them, to find what names stand for."""

import ast
from collections.abc import Iterator
from functools import cache

UNKNOWN = object()  # the sources do not say, so it gets the benefit of the doubt


class Sources:
    """Looks names up in the source files of a package, through re-exports and base classes."""

    def __init__(self, files: dict[str, str]):
        """Use the sources in `files`, by path such as `torchrec/distributed/types.py`."""
        self._files = files
        self._module = cache(self._load)
        self._calls_in = cache(self._all_calls)
        self._packages = {path.split("/")[0] for path in files}

    def _load(self, module: str) -> tuple[str, ast.Module] | None:
        """Return the package from which relative imports in a module start, and the module's syntax tree."""
        path = module.replace(".", "/")
        if f"{path}/__init__.py" in self._files:
            return module, ast.parse(self._files[f"{path}/__init__.py"])
        if f"{path}.py" in self._files:
            return module.rpartition(".")[0], ast.parse(self._files[f"{path}.py"])
        return None

    def find(self, name: str):
        """Return what a full dotted name stands for: (module, node), UNKNOWN, or None if it does not exist."""
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
        """Return a base class, or None for one that has no members of its own."""
        name = ast.unparse(base).split("[")[0]
        if name.split(".")[-1] in ("object", "Enum", "str", "ABC", "Generic", "NamedTuple", "Protocol"):
            return None
        found = self.find(f"{module}.{name}")
        return found if isinstance(found, tuple) and isinstance(found[1], ast.ClassDef) else UNKNOWN

    def keywords(self, name: str) -> set[str] | None:
        """Return the keywords that a call of `name` accepts, or None if it accepts any, or this is unknown."""
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

    def function(self, name: str) -> tuple[ast.FunctionDef | None, bool]:
        """Return the function that a call of `name` runs, if known, and whether its first argument is an object."""
        found = self.find(name)
        if not isinstance(found, tuple):
            return None, False
        module, node = found
        if isinstance(node, ast.ClassDef):
            init = self._in_class(module, node, "__init__")
            return (init[1] if isinstance(init, tuple) and isinstance(init[1], ast.FunctionDef) else None), True
        decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", [])]
        known = isinstance(node, ast.FunctionDef) and not set(decorators) - {"classmethod", "staticmethod"}
        return (node if known else None), "classmethod" in decorators

    def calls(self, method: str, folder: str) -> Iterator[tuple[str, ast.Call]]:
        """Yield path and call for every call of an attribute of this name in a folder."""
        for path, text in self._files.items():
            if path.startswith(folder) and f".{method}(" in text:
                yield from ((path, call) for name, call in self._calls_in(path) if name == method)

    def _all_calls(self, path: str) -> list[tuple[str, ast.Call]]:
        """Return the calls of attributes in a file, each with the attribute's name."""
        nodes = ast.walk(ast.parse(self._files[path]))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        return [(call.func.attr, call) for call in calls if isinstance(call.func, ast.Attribute)]

    def _fields(self, module: str, node: ast.ClassDef) -> set[str] | None:
        """Return the fields of a dataclass or named tuple and of its bases."""
        fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        for base in node.bases:
            found = self._base(module, base)
            inherited = self._fields(*found) if isinstance(found, tuple) else set()
            if found is UNKNOWN or inherited is None:
                return None
            fields |= inherited
        return fields


def up(package: str, level: int) -> str:
    """Return the package that `level` leading dots of a relative import stand for."""
    return ".".join(package.split(".")[: len(package.split(".")) - level + 1]) if level else ""


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body and of the branches in it."""
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

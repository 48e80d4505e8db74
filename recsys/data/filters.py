"""Filters of rows in the syntax of Python expressions, such as `day >= '2026-11-01' and country in ['de', 'at']`.

A filter is parsed without a look at the data (`parse_filter`), takes the types of the columns (`Condition.bind`), and
answers two questions: what it is for each row of a table (`Condition.mask`), and what it may be for whole row groups of
which only the least and greatest values are known (`Condition.outcomes`).

Nulls are those of SQL: a comparison with null is null, `not` of null is null, and a row for which the filter is null is
left out, as one for which it is false. So `x != 5` leaves out the nulls of x; add `or x is None` to take them.
"""

import ast
import re
from typing import Any

from recsys.data.conditions import KEY, Both, Compare, CompareColumns, Condition, In, IsNull, IsTrue, Not
from recsys.errors import UserError

_OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_CONSTANTS = {"true": "True", "false": "False", "null": "None", "none": "None"}
_HINTS = (
    (r"(?<![=!<>])=(?!=)", "write == for equal"),
    (r"&", "write and in place of &"),
    (r"\|", "write or in place of |"),
    (r"!(?!=)", "write not in place of !"),
    (r"<>", "write != for unequal"),
    (r"\b(AND|OR|NOT|IN|IS)\b", "write and, or, not, in and is in lower case"),
    (r"(?i)\bbetween\b", "write low <= column <= high"),
    (r"(?i)\blike\b", "patterns of text are not known; use == or in"),
)


def parse_filter(text: str) -> Condition:
    """Parse a filter; the module's docstring says what it means.

    Known are comparisons of columns with literals or columns (== != < <= > >=, also chained), `in` and `not in` lists,
    `is None` and `is not None`, bool columns by themselves, and, or, not, parentheses, and `col("odd name")` for a
    column whose name is no Python name. Literals are numbers, strings, True and False. A string compared with a date or
    timestamp is read as ISO 8601 and as UTC where the column has a zone and the string has none.

    Raises:
        UserError: the text is no such expression.
    """
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{KEY} is {text!r}, and must be an expression such as \"day >= '2026-11-01'\"")
    try:
        tree = ast.parse(f"({text}\n)", mode="eval")
        return _Parser(" ".join(text.split())).condition(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        found = _hint(text) or getattr(error, "msg", None) or "it is nested too deeply"
        raise UserError(f"{KEY}: '{' '.join(text.split())}' cannot be understood ({found})") from error


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text

    def condition(self, node: ast.expr) -> Condition:
        if isinstance(node, ast.BoolOp):
            parts = [self.condition(value) for value in node.values]
            return _joined(parts) if isinstance(node.op, ast.And) else Not(_joined([Not(part) for part in parts]))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return Not(self.condition(node.operand))
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            return _joined([self._compare(*side) for side in zip(sides, node.ops, sides[1:], strict=False)])
        name = self._column(node)
        if name is None:
            raise self._unknown(node)
        return IsTrue(name)

    def _compare(self, left: ast.expr, kind: ast.cmpop, right: ast.expr) -> Condition:
        name, other = self._column(left), self._column(right)
        if isinstance(kind, ast.Is | ast.IsNot):
            if name is None or not isinstance(right, ast.Constant) or right.value is not None:
                raise self._unknown(left, "'is' and 'is not' compare a column with None")
            return IsNull(name) if isinstance(kind, ast.Is) else Not(IsNull(name))
        if isinstance(kind, ast.In | ast.NotIn):
            if name is None or not isinstance(right, ast.List | ast.Tuple | ast.Set) or not right.elts:
                raise self._unknown(left, "'in' compares a column with a list of values, such as ['a', 'b']")
            among = In(name, tuple(self._literal(each) for each in right.elts))
            return among if isinstance(kind, ast.In) else Not(among)
        operator = _OPERATORS[type(kind)]
        if name is not None and other is not None:
            return CompareColumns(name, operator, other)
        if name is not None:
            return Compare(name, operator, self._literal(right))
        if other is not None:
            return Compare(other, _MIRRORED[operator], self._literal(left))
        self._literal(left), self._literal(right)
        raise self._unknown(left, f"it compares {ast.unparse(left)} with {ast.unparse(right)}, and no column")

    def _column(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            if node.id in _CONSTANTS:
                raise self._unknown(node, f"write {_CONSTANTS[node.id]}, or col('{node.id}') for the column")
            return node.id
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "col":
            if len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                return node.args[0].value
            raise self._unknown(node, "col takes one name in quotes")
        if isinstance(node, ast.Attribute):
            raise self._unknown(node, f"a column with a dot in its name is col('{ast.unparse(node)}')")
        return None

    def _literal(self, node: ast.expr) -> Any:
        signed = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd)
        inner = node.operand if isinstance(node, ast.UnaryOp) and signed else node
        value: Any = inner.value if isinstance(inner, ast.Constant) else ...
        if type(value) not in ((int, float) if signed else (int, float, str, bool, type(None))):
            raise self._unknown(node)
        if value is None:
            raise self._unknown(node, "None is compared with 'is None' or 'is not None'")
        return -value if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else value

    def _unknown(self, node: ast.expr, says: str = "") -> UserError:
        known = "a filter is made of comparisons of columns with values, in, is None, and, or, not, and col('odd name')"
        says = says or f"'{ast.unparse(node)}' is not known; {_hint(self._text) or known}"
        return UserError(f"{KEY}: '{self._text}' cannot be understood ({says})")


def _joined(parts: list[Condition]) -> Condition:
    # Halves, so that a long filter makes no deep tree.
    half = len(parts) // 2
    return parts[0] if len(parts) == 1 else Both(_joined(parts[:half]), _joined(parts[half:]))


def _hint(text: str) -> str:
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "''", text)
    return next((hint for pattern, hint in _HINTS if re.search(pattern, bare)), "")

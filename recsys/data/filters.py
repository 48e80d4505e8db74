"""Filters of rows in the syntax of Python expressions, such as `day >= '2026-11-01' and country in ['de', 'at']`.

A filter is parsed without a look at the data (`parse_filter`) and then bound to the types of the columns
(`Condition.bind`). It answers two questions: its value for each row of a table (`Condition.mask`), and the values that
it may have in row groups of which only the least and greatest values are known (`Condition.outcomes`).

Nulls behave as in SQL: a comparison with null is null, `not` of null is null, and a row for which the filter is null is
left out, like one for which it is false. So `x != 5` leaves out the nulls of x; add `or x is None` to keep them.
"""

import ast
import io
import re
import tokenize
from contextlib import suppress
from typing import Any, NoReturn

from recsys.data.conditions import KEY, Column, Condition
from recsys.errors import UserError

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_ODD_NAMES = "a column whose name is no plain word is col('odd name')"
_CONSTANTS = {"true": "True", "false": "False", "null": "None", "none": "None"}
_HINTS = (
    (r"\b\d{4}-\d\d?-\d\d?\b", "write dates and times in quotes: day >= '2026-11-01'"),
    (r"(?<![=!<>])=(?!=)", "write == for equal"),
    (r"&", "write and in place of &"),
    (r"\|", "write or in place of |"),
    (r"!(?!=)", "write not in place of !"),
    (r"<>", "write != for unequal"),
    (r"\b(AND|OR|NOT|IN|IS)\b", "write and, or, not, in and is in lower case"),
    (r"(?i)\bbetween\b", "write low <= column <= high"),
    (r"(?i)\blike\b", "patterns of text are not known; use == or in"),
)


def written(column: str) -> str:
    """Return how a filter names a column, for messages: by `col` if the name alone would mean something else."""
    with suppress(SyntaxError, ValueError):
        node = ast.parse(column, mode="eval").body
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) == column and column not in _CONSTANTS:
            return column
    return f"col({column!r})"


def parse_filter(text: str) -> Condition:
    """Parse a filter; the module's docstring says what it means.

    It may have comparisons of columns with literals or columns (== != < <= > >=, also chained), `in` and `not in`
    lists, `is None` and `is not None`, bool columns by themselves, and, or, not, parentheses, `device.os` for a field
    of a struct, and `col("odd name")` for a column whose name is not a Python name. `sampled(0.1, 7)` is true for a
    tenth of the rows, drawn by seed 7. Literals are numbers, strings, True and False. A string compared with a date or
    timestamp is read as ISO 8601, and as UTC if the column has a zone and the string has none.

    Raises:
        UserError: the text is not such an expression.
    """
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{KEY} is {text!r}, but must be an expression such as \"day >= '2026-11-01'\"")
    try:
        source = f"({text}\n)"
        _refuse_comments(source)
        tree = ast.parse(source, mode="eval")
        return _Parser(source.encode().splitlines(), " ".join(text.split())).condition(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # Python's own advice does not fit filters: for `odd name > 3` it is that a comma may be missing.
        said = getattr(error, "msg", "it is nested too deeply").partition(". Perhaps")[0]
        why = _hint(text) or (f"{said}; {_ODD_NAMES}" if "invalid" in said else said)
        raise UserError(f"{KEY}: '{' '.join(text.split())}' cannot be understood ({why})") from error


def _refuse_comments(source: str) -> None:
    """Raise a SyntaxError for a `#` right after something else: of `a#b > 3`, Python would read only `a`."""
    with suppress(tokenize.TokenError):  # parsing refuses such texts too
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            before = token.line[: token.start[1]]
            if token.type == tokenize.COMMENT and before and not before[-1].isspace():
                raise SyntaxError("invalid '#', which begins a comment")


class _Parser:
    def __init__(self, lines: list[bytes], text: str) -> None:
        self._lines, self._text = lines, text

    def condition(self, node: ast.expr) -> Condition:
        if isinstance(node, ast.BoolOp):
            name = "and" if isinstance(node.op, ast.And) else "or"
            return Condition(name, tuple(self.condition(value) for value in node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return Condition("not", (self.condition(node.operand),))
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            return Condition("and", tuple(map(self._compare, sides, node.ops, sides[1:])))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "sampled":
            return self._sampled(node)
        return Condition("is true", column=self._column(node) or self._refuse(node))

    def _sampled(self, node: ast.Call) -> Condition:
        match [self._literal(argument) for argument in node.args]:
            case [int() | float() as share, int() as seed] if 0 <= share <= 1 and seed >= 0 and not node.keywords:
                return Condition("sampled", value=(share, seed))
        self._refuse(node, "sampled takes a share of the rows, from 0 to 1, and a seed: sampled(0.1, 7)")

    def _compare(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Condition:
        name, right_column = self._column(left), self._column(right)
        if isinstance(operator, ast.Is | ast.IsNot):
            if name is None or not isinstance(right, ast.Constant) or right.value is not None:
                self._refuse(left, "'is' and 'is not' compare a column with None")
            condition = Condition("is None", column=name)
        elif isinstance(operator, ast.In | ast.NotIn):
            if name is None or not isinstance(right, ast.List | ast.Tuple | ast.Set) or not right.elts:
                self._refuse(left, "'in' compares a column with a list of values, such as ['a', 'b']")
            condition = Condition("in", column=name, value=tuple(map(self._literal, right.elts)))
        elif name is not None:
            value = self._literal(right) if right_column is None else Column(right_column)
            return Condition(_COMPARISONS[type(operator)], column=name, value=value)
        elif right_column is not None:
            return Condition(_MIRRORED[_COMPARISONS[type(operator)]], column=right_column, value=self._literal(left))
        else:
            values = self._literal(left), self._literal(right)
            odd = f"; {_ODD_NAMES}" if isinstance(values[0], str) else ""
            self._refuse(left, f"it compares {ast.unparse(left)} with {ast.unparse(right)}, and no column{odd}")
        return condition if isinstance(operator, ast.Is | ast.In) else Condition("not", (condition,))

    def _column(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            if node.id in _CONSTANTS:
                self._refuse(node, f"write {_CONSTANTS[node.id]}, or col('{node.id}') for the column")
            return self._written(node, node.col_offset)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "col":
            if len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                return node.args[0].value
            self._refuse(node, "col takes one name in quotes")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            outer = self._column(node.value)
            return outer and f"{outer}.{self._written(node).rpartition('.')[2].strip()}"
        return None

    def _written(self, node: ast.expr, start: int = 0) -> str:
        """Return the text from byte `start` of an expression's last line to the expression's end.

        The tree is no help: Python equates µ and μ, and ö as one sign and as two; names of columns may differ by them.
        """
        return self._lines[(node.end_lineno or 0) - 1][start : node.end_col_offset].decode()

    def _literal(self, node: ast.expr) -> Any:
        try:
            value = ast.literal_eval(node)
        except ValueError:
            value = ...
        if value is None:
            self._refuse(node, "None is compared with 'is None' or 'is not None'")
        return value if type(value) in (int, float, str, bool) else self._refuse(node)

    def _refuse(self, node: ast.expr, says: str = "") -> NoReturn:
        known = "a filter is made of comparisons of columns with values, in, is None, and, or, not, and col('odd name')"
        says = says or f"'{ast.unparse(node)}' is not known; {_hint(self._text) or known}"
        raise UserError(f"{KEY}: '{self._text}' cannot be understood ({says})")


def _hint(text: str) -> str:
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "''", text)
    return next((hint for pattern, hint in _HINTS if re.search(pattern, bare)), "")

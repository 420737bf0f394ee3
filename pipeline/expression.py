"""Expressions over a visit's results, such as ``"energy_per_atom < -3 and n_atoms <= 500"``.

A recipe file or a campaign folder may come from anyone, so an expression is data: it is parsed, checked against a
short list of what it may say, and walked. It is never compiled, and it reaches no attribute, item or builtin.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: An expression longer or deeper than this is no predicate anybody wrote by hand.
MAX_LENGTH, MAX_DEPTH = 2_000, 50

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,  # of floats: an integer power could fill the memory
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "isfinite": math.isfinite,
    "isnan": math.isnan,
}
#: Names that are values: "status == 'converged'" and "isfinite(energy)" need no more than strings and functions.
CONSTANTS: dict[str, Any] = {"True": True, "False": False, "pi": math.pi, "nan": math.nan, "inf": math.inf}


class ExpressionError(ValueError):
    """An expression says something it may not, or names a result that is not there."""


@dataclass(frozen=True)
class Expression:
    """A checked expression.

    Raises:
        ExpressionError: at construction, when the text does not parse or says more than it may.
    """

    text: str

    def __post_init__(self) -> None:
        _check(self._tree(), self.text, 0)

    def _tree(self) -> ast.expr:
        if not isinstance(self.text, str) or not self.text.strip():
            raise ExpressionError(f"an expression must be text such as 'energy_per_atom < -3', got {self.text!r}")
        if len(self.text) > MAX_LENGTH:
            raise ExpressionError(f"an expression may have {MAX_LENGTH} characters, this one has {len(self.text)}")
        try:
            return ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ExpressionError(f"{self.text!r} is no expression: {error}") from error

    @property
    def names(self) -> frozenset[str]:
        """The results it asks for."""
        nodes = list(ast.walk(self._tree()))
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        asked = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in called}
        return frozenset(asked - CONSTANTS.keys())

    def __call__(self, results: Mapping[str, Any]) -> bool:
        """Whether it holds for these results.

        Raises:
            ExpressionError: a name is not among the results, the arithmetic has no answer (division by zero), or
                what is compared is NaN.
        """
        try:
            return _truth(self._tree(), results)
        except ExpressionError as error:
            raise ExpressionError(f"{self.text!r}: {error}") from None
        except (ArithmeticError, TypeError, ValueError) as error:
            raise ExpressionError(f"{self.text!r} has no answer: {error}") from error


def _check(node: ast.AST, text: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ExpressionError(f"{text[:60]!r}… is nested deeper than {MAX_DEPTH}")
    allowed = True
    match node:
        case ast.Constant(value=value):
            allowed = isinstance(value, bool | int | float | str)
        case ast.BinOp(op=op):
            allowed = type(op) in _BINARY
        case ast.UnaryOp(op=op):
            allowed = type(op) in _UNARY
        case ast.Compare(ops=ops):
            allowed = all(type(op) in _COMPARE for op in ops)
        case ast.Call(func=func, keywords=keywords):
            allowed = isinstance(func, ast.Name) and func.id in FUNCTIONS and not keywords
        case ast.Name() | ast.BoolOp() | ast.IfExp() | ast.Tuple() | ast.List():
            pass
        case _:
            allowed = False
    if not allowed:
        said = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
        raise ExpressionError(
            f"{text!r} may not say {said!r}: names of results, numbers, strings, comparisons, arithmetic, and/or/not "
            f"and {', '.join(sorted(FUNCTIONS))} are allowed; for more, hand the filter a function"
        )
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            _check(child, text, depth + 1)


def _value(node: ast.expr, results: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return _look_up(name, results)
        case ast.BoolOp(op=op, values=values):
            return _either(isinstance(op, ast.And), values, results)
        case ast.BinOp(op=operation, left=left, right=right):
            return _arithmetic(operation, _value(left, results), _value(right, results))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _truth(operand, results)
        case ast.UnaryOp(op=sign, operand=operand):
            return _UNARY[type(sign)](_value(operand, results))
        case ast.Compare(left=left, ops=ops, comparators=others):
            sides = [_value(side, results) for side in (left, *others)]
            for side, value in zip((left, *others), sides, strict=True):
                _refuse_nan(side, value)
            return all(_COMPARE[type(o)](a, b) for o, a, b in zip(ops, sides, sides[1:], strict=False))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _truth(test, results) else orelse, results)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return [_value(item, results) for item in items]
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _call(name, arguments, [_value(a, results) for a in arguments])
    raise AssertionError(f"{ast.dump(node)} passed the check")


def _call(name: str, arguments: list[ast.expr], values: list[Any]) -> Any:
    if name in ("min", "max"):  # compare, so that a NaN among several would be lost or not by its place
        for argument, value in zip(arguments, values, strict=True):
            _refuse_nan(argument, value)
    return FUNCTIONS[name](*values)


def _refuse_nan(side: ast.expr, value: Any) -> None:
    """Every comparison with NaN is False, which would be an answer where there is none."""
    values = value if isinstance(value, list) else [value]
    if any(isinstance(v, float) and math.isnan(v) for v in values):
        raise ExpressionError(
            f"{ast.unparse(side)} is NaN, so there is no answer; to ask whether it is, use isnan(...) or isfinite(...)"
        )


def _truth(node: ast.expr, results: Mapping[str, Any]) -> bool:
    """A value taken for true or false: NaN is neither."""
    value = _value(node, results)
    _refuse_nan(node, value)
    return bool(value)


def _either(conjunction: bool, values: list[ast.expr], results: Mapping[str, Any]) -> bool:
    for value in values:
        if _truth(value, results) is not conjunction:
            return not conjunction
    return conjunction


def _arithmetic(operation: ast.operator, a: Any, b: Any) -> Any:
    # 'x' * 10**9 is text that fills the memory; sums of texts are of no use here either.
    if isinstance(a, str | list) or isinstance(b, str | list):
        raise ExpressionError("arithmetic is for numbers")
    return _BINARY[type(operation)](a, b)


def _look_up(name: str, results: Mapping[str, Any]) -> Any:
    if name in results:
        value = results[name]
        return value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
    if name in CONSTANTS:
        return CONSTANTS[name]
    known = ", ".join(sorted(results)) or "none"
    raise ExpressionError(f"there is no result named {name!r}; there are: {known}")


__all__ = ["Expression", "ExpressionError"]

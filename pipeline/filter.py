"""Filters: nodes of a graph that let a system pass or stop it, by the results of the stage before.

A filter costs no ranks: it is asked on the lead of the stage before it, when a system has finished there. It is a
visit of its own in the ledger: `finished` for a system that passed, `filtered` for one that stopped there, `failed`
where the question had no answer (a result that is not there, an error in a function).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..stages.graph import Node
from .errors import RecipeError
from .expression import Expression, ExpressionError

if TYPE_CHECKING:
    from ..stages.reporter import Outcome

#: Names that a predicate finds besides the results.
ALWAYS_THERE = ("system", "status", "steps", "n_atoms")

Predicate = str | Callable[[Mapping[str, Any]], bool]

_WORDS = {"<=": "le", ">=": "ge", "==": "is", "!=": "isnt", "<": "below", ">": "above", "*": "times", "/": "by"}


@dataclass(frozen=True)
class Filter(Node):
    """Lets the systems pass for which `predicate` holds.

    Args:
        predicate: text over the results of the stage before, such as ``"energy_per_atom < -3"``, or a function of a
            mapping of these results. Besides the results there are `n_atoms`, `steps`, `status` and `system` (the id).
            A function that can be imported keeps its name in ``recipe.json``; a lambda lives as long as its process.
            Either way `resume` asks for the recipe again, as it never imports what a file names.
        name: of the node; by default made from the predicate.

    Raises:
        RecipeError: the text says what an expression may not say; see `mattermill.pipeline.expression`.
    """

    predicate: Predicate
    name: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.predicate, str):
            try:
                Expression(self.predicate)
            except ExpressionError as error:
                raise RecipeError(f"Filter: {error}") from None
        elif not callable(self.predicate):
            raise RecipeError(
                f"Filter needs an expression such as 'energy_per_atom < -3', or a function, not {self.predicate!r}"
            )
        if not self.name:
            object.__setattr__(self, "name", _default_name(self.predicate))

    def __call__(self, results: Mapping[str, Any]) -> bool:
        """Whether a system with these results passes."""
        if isinstance(self.predicate, str):
            return Expression(self.predicate)(results)
        return bool(self.predicate(results))

    @property
    def reference(self) -> str:
        """What the predicate is, as text: an expression, or ``module:function``."""
        if isinstance(self.predicate, str):
            return self.predicate
        module = getattr(self.predicate, "__module__", "?")
        return f"{module}:{getattr(self.predicate, '__qualname__', type(self.predicate).__qualname__)}"


def _default_name(predicate: Predicate) -> str:
    if isinstance(predicate, str):
        text = re.sub(r"<=|>=|==|!=|[<>*/]", lambda m: f" {_WORDS[m[0]]} ", predicate)
    else:
        text = getattr(predicate, "__name__", type(predicate).__name__)
    return "filter-" + re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")[:60]


@dataclass(frozen=True)
class Sieve:
    """A filter and the filters that follow it directly."""

    filter: Filter
    behind: tuple[Sieve, ...] = ()


def judge(sieves: Sequence[Sieve], outcome: Outcome) -> dict[str, bool | str]:
    """The answers of the filters behind a stage for one finished visit; those behind a False are not asked.

    Returns:
        True, False, or as text why there is no answer. An error in a user's function stops its system, not the gang.
    """
    results = {  # with what `ALWAYS_THERE` names
        **outcome.results,
        "system": outcome.id,
        "status": str(outcome.status),
        "steps": outcome.steps,
        "n_atoms": outcome.n_atoms,
    }
    answers: dict[str, bool | str] = {}
    for sieve in sieves:
        try:
            answer: bool | str = sieve.filter(results)
        except ExpressionError as error:
            answer = str(error)
        except Exception as error:  # the user's function: whatever it raises is the reason that the visit records
            answer = f"{sieve.filter.reference} raised {type(error).__name__}: {error}"
        answers[sieve.filter.name] = answer
        if answer is True:
            answers |= judge(sieve.behind, outcome)
    return answers


__all__ = ["ALWAYS_THERE", "Filter", "Predicate", "Sieve", "judge"]

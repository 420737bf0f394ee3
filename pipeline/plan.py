"""The plan: a recipe's graph, checked, with what the campaign asks of it. Pure data; nothing runs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..stages.graph import Node, Piece
from .errors import RecipeError
from .expression import Expression
from .filter import ALWAYS_THERE, Filter, Sieve

if TYPE_CHECKING:
    from ..domain.models.base import Model
    from ..stages.stage import Stage

_NAME = re.compile(r"[^\x00-\x1f/\\]{1,100}")


@dataclass(frozen=True)
class Plan:
    """A checked graph: a forest, so that every system passes through a node at most once.

    Attributes:
        nodes: by name, in the order in which they were written.
        targets: per node the names of those that follow.
        heads: where systems enter.
    """

    nodes: dict[str, Node]
    targets: dict[str, tuple[str, ...]]
    heads: tuple[str, ...]

    @classmethod
    def of(cls, graph: Piece) -> Plan:
        """Raises `RecipeError`: a name used twice, a cycle, a node reached by two ways, a filter in front."""
        _check_names(graph)
        _check_cycles(graph)
        _check_reconvergence(graph)
        names = graph.names
        targets = {name: tuple(names[t] for t in graph.targets(k)) for k, name in enumerate(names)}
        heads = tuple(name for k, name in enumerate(names) if not graph.sources(k))
        plan = cls(dict(zip(names, graph.nodes, strict=True)), targets, heads)
        for head in heads:
            if plan.is_filter(head):
                raise RecipeError(
                    f"the filter {head!r} stands before any stage, so there are no results to ask: put it behind a "
                    "stage, or leave those structures out of the input"
                )
        return plan

    def is_filter(self, name: str) -> bool:
        return isinstance(self.nodes[name], Filter)

    @property
    def stages(self) -> dict[str, Stage]:
        """The nodes that are stages, upstream ones before those that follow them."""
        return {name: self.nodes[name] for name in self._order() if not self.is_filter(name)}  # type: ignore[misc]

    def height(self, name: str) -> int:
        """Stages between this node and the farthest end behind it; 0 at an end."""
        return max((self.height(t) + (not self.is_filter(t)) for t in self.targets[name]), default=0)

    def stages_behind(self, name: str) -> tuple[str, ...]:
        """The stages whose streams this stage feeds, directly or through filters."""
        found: list[str] = []
        for target in self.targets[name]:
            found += self.stages_behind(target) if self.is_filter(target) else [target]
        return tuple(found)

    def producers(self, name: str) -> tuple[str, ...]:
        """The stages that feed this one; of a forest none or one."""
        return tuple(s for s in self.stages if name in self.stages_behind(s))

    def sieves_behind(self, name: str) -> tuple[Sieve, ...]:
        """The filters directly behind a node, each with those behind it."""
        return tuple(
            Sieve(self.nodes[t], self.sieves_behind(t))  # type: ignore[arg-type]
            for t in self.targets[name]
            if self.is_filter(t)
        )

    def _order(self) -> list[str]:
        order: list[str] = []

        def visit(name: str) -> None:
            order.append(name)
            for target in self.targets[name]:
                visit(target)

        for head in self.heads:
            visit(head)
        return order

    def lines(self) -> list[str]:
        """The graph as text, one node a line, branches indented."""
        text: list[str] = []

        def show(name: str, depth: int) -> None:
            text.append("  " * depth + ("? " if self.is_filter(name) else "") + name)
            for target in self.targets[name]:
                show(target, depth + (len(self.targets[name]) > 1))

        for head in self.heads:
            show(head, 0)
        return text


def check_stages(plan: Plan, model: Model | None) -> None:
    """What only makes sense with the recipe's model: every stage has one, and asks for ranks that can be."""
    from ..domain.models.base import Model
    from ..stages.stage import Stage

    for name, stage in plan.stages.items():
        if not isinstance(stage, Stage):
            raise RecipeError(f"{name!r} is a {type(stage).__name__}: a graph is made of stages and filters")
        own = stage.model or model
        if own is None:
            raise RecipeError(f"stage {name!r} has no model: give one to the recipe or to the stage (model=...)")
        if not isinstance(own, Model):
            raise RecipeError(
                f"the model of stage {name!r} must be a mattermill model such as mm.models.noble_gases(), "
                f"is {type(own).__name__}"
            )
        if stage.ranks != "auto" and (not isinstance(stage.ranks, int) or stage.ranks < 1):
            raise RecipeError(f"ranks of stage {name!r} must be a whole number from 1 or 'auto', is {stage.ranks!r}")


def check_filters(plan: Plan) -> None:
    """A filter that asks for a result which its stage will never give is told now, not when the stage has run.

    What a stage of the user's own with `results` of its own gives is not known here; nor what a function asks for.
    """
    from ..stages.stage import Stage

    for name, stage in plan.stages.items():
        if type(stage).results is Stage.results:
            _check_sieves(plan.sieves_behind(name), name)


def _check_sieves(sieves: Sequence[Sieve], stage: str) -> None:
    from ..stages.result_units import UNITS

    known = {*UNITS, *ALWAYS_THERE}
    for sieve in sieves:
        if isinstance(sieve.filter.predicate, str):
            for missing in sorted(Expression(sieve.filter.predicate).names - known):
                near = difflib.get_close_matches(missing, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
                raise RecipeError(
                    f"filter {sieve.filter.name!r} asks for {missing!r}, which stage {stage!r} does not give: {hint}"
                )
        _check_sieves(sieve.behind, stage)


def ranks_of(stage: Stage) -> int:
    """Ranks that one gang of the stage has. `auto` is one for now: the smallest sub-mesh there is."""
    return 1 if stage.ranks == "auto" else int(stage.ranks)


def _check_names(graph: Piece) -> None:
    seen: dict[str, Node] = {}
    for node in graph.nodes:
        if not isinstance(node.name, str) or not _NAME.fullmatch(node.name) or node.name.startswith("."):
            raise RecipeError(f"{node.name!r} cannot name a stage: use 1 to 100 characters, no slash, no leading dot")
        if node.name in seen:
            raise RecipeError(
                f"the name {node.name!r} is used twice, by {_brief(seen[node.name])} and {_brief(node)}: give one of "
                f"them a name of its own, such as name='{node.name}-2'"
            )
        seen[node.name] = node


def _check_cycles(graph: Piece) -> None:
    done: set[int] = set()

    def visit(node: int, path: list[int]) -> None:
        if node in path:
            loop = [graph.names[k] for k in [*path[path.index(node) :], node]]
            raise RecipeError(
                f"{' >> '.join(loop)} is a cycle, a system would never come out: to do {loop[0]!r} again, add a stage "
                f"like it under a name of its own, such as name='{loop[0]}-2'"
            )
        if node not in done:
            for target in graph.targets(node):
                visit(target, [*path, node])
            done.add(node)

    for k in range(len(graph.nodes)):
        visit(k, [])


def _check_reconvergence(graph: Piece) -> None:
    for k, name in enumerate(graph.names):
        sources = [graph.names[s] for s in graph.sources(k)]
        if len(sources) > 1:
            raise RecipeError(
                f"{name!r} follows both {' and '.join(map(repr, sources))}, so a system would reach it twice: give "
                f"each branch a stage of its own, such as name='{name}-{sources[0]}' and name='{name}-{sources[1]}'"
            )


def _brief(node: Node) -> str:
    text = repr(node)
    return text if len(text) < 80 else text[:77] + "..."


__all__ = ["Plan", "check_filters", "check_stages", "ranks_of"]

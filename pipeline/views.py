"""What the command line shows of a recipe and of a campaign: trees and tables, built from plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

if TYPE_CHECKING:
    from ..stages.graph import Node
    from .ledger import Ledger
    from .recipe import Recipe

#: Column order of the status table; a status that is none of these gets a column behind them.
STATUSES = (
    *("pending", "running", "converged", "unconverged", "equilibrated", "unequilibrated", "finished"),
    *("filtered", "failed", "quarantined"),
)
_COLOURS = {"failed": "red", "quarantined": "red", "running": "cyan", "pending": "dim", "filtered": "yellow"}


def recipe_tree(recipe: Recipe) -> Tree:
    """The graph of a recipe as a tree of text, with the parameters that differ from their defaults."""
    plan = recipe.plan
    model = describe(recipe.model) if recipe.model is not None else "of each stage"
    tree = Tree(f"[bold]{escape(recipe.name)}[/]")
    tree.add(f"seed {recipe.seed}; model {escape(model)}", style="dim")

    _grow(tree, plan.heads, plan.targets, lambda name: describe_node(plan.nodes[name]))
    return tree


def document_tree(document: Mapping[str, Any]) -> Tree:
    """The graph of a ``recipe.json`` whose recipe cannot be built without the user's own code: names only."""
    tree = Tree(f"[bold]{escape(str(document.get('name')))}[/]")
    tree.add("it uses code of its own: `mattermill show RECIPE.py` shows the parameters", style="dim")
    targets: dict[str, list[str]] = {name: [] for name in node_names(document)}
    for source, target in document.get("edges", ()):
        targets[source].append(target)
    behind = {target for several in targets.values() for target in several}
    _grow(tree, [name for name in targets if name not in behind], targets, lambda name: "")
    return tree


def _grow(tree: Tree, heads: Sequence[str], targets: Mapping[str, Sequence[str]], text: Callable[[str], str]) -> None:
    """Add a forest: what follows alone stands below at the same depth, only a fan-out indents."""
    for head in heads:
        name, parent = head, tree
        branch = parent.add(f"[bold]{escape(name)}[/]  {escape(text(name))}".rstrip())
        if len(heads) > 1:
            parent = branch
        while len(targets[name]) == 1:
            name = targets[name][0]
            branch = parent.add(f"[bold]{escape(name)}[/]  {escape(text(name))}".rstrip())
        _grow(branch, targets[name], targets, text)


def node_names(document: Mapping[str, Any]) -> list[str]:
    """The names of the nodes of a ``recipe.json``, in the order of the graph."""
    nodes = document.get("nodes", ())
    if isinstance(nodes, Mapping):
        return [str(name) for name in nodes]
    return [str(node["name"]) for node in nodes]


def describe_node(node: Node) -> str:
    """Type and parameters of a stage or filter, its name left out (it stands before)."""
    if not dataclasses.is_dataclass(node):
        return type(node).__name__
    return _call(node, skip=("name",))


def describe(value: Any) -> str:
    """A short text for a parameter: dataclasses as calls with what differs from the default."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _call(value)
    if callable(value):
        return getattr(value, "__qualname__", repr(value))
    if isinstance(value, Mapping):
        pairs = (f"{k if isinstance(k, str) else '-'.join(map(str, k))}: {describe(v)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    text = f"{value:.5g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _call(value: Any, skip: Sequence[str] = ()) -> str:
    parts = []
    for field in dataclasses.fields(value):
        if field.name in skip or not field.init or not field.repr:
            continue
        content = getattr(value, field.name)
        if field.default is not dataclasses.MISSING and _same(content, field.default):
            continue
        if field.default_factory is not dataclasses.MISSING and _same(content, field.default_factory()):
            continue
        parts.append(f"{field.name}={describe(content)}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and repr(one) == repr(other)


def status_table(
    title: str, stages: Sequence[str], counts: Mapping[str, Mapping[str, int]], steps: Mapping[str, str]
) -> Table:
    """A row per stage: how many systems are in which state, and how far the running ones are.

    Args:
        title: heading.
        stages: in the order of the graph; those of `counts` that are missing follow.
        counts: visits per stage and status.
        steps: free text per stage for the last column.
    """
    order = [*stages, *(name for name in counts if name not in stages)]
    present = {status for row in counts.values() for status, number in row.items() if number}
    columns = [s for s in STATUSES if s in present] + sorted(present - set(STATUSES))
    table = Table(title=title, title_justify="left")
    table.add_column("stage", no_wrap=True)
    for status in columns:
        table.add_column(status, justify="right", style=_COLOURS.get(status, ""))
    table.add_column("in all", justify="right")
    if any(steps.values()):
        table.add_column("steps")
    for name in order:
        row = counts.get(name, {})
        cells = [str(row[s]) if row.get(s) else "" for s in columns]
        more = [steps.get(name, "")] if any(steps.values()) else []
        table.add_row(escape(name), *cells, str(sum(row.values())), *more)
    return table


def running_steps(ledger: Ledger) -> dict[str, str]:
    """Per stage, the range of steps of the systems that run now, as of their last checkpoint."""
    found: dict[str, list[int]] = {}
    for visit in ledger.pending():
        if visit.is_running:
            found.setdefault(visit.stage, []).append(visit.steps)
    return {
        stage: f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)} - {max(steps)}"
        for stage, steps in found.items()
    }


def failure_lines(ledger: Ledger, limit: int = 10) -> list[str]:
    """One line per visit that failed or was quarantined, the first ones only."""
    lines: list[str] = []
    for status in ("failed", "quarantined"):
        lines += [f"{v.system}: {status} in {v.stage}: {v.reason}" for v in ledger.visits(status=status)]
    if len(lines) > limit:
        lines = [*lines[:limit], f"... and {len(lines) - limit} more"]
    return lines

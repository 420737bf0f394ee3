"""Graph pieces: stages and filters joined by ``>>`` and lists, as pure data. Nothing here runs or mutates anything.

``a >> b`` leads from a to b; ``a >> [b, c]`` fans out; ``[b, c] >> d`` brings two ends together (whether that makes
sense is for the recipe to say). A node that equals one already in the piece *is* that node: so ``a >> b >> a`` is a
cycle, and ``a >> [b >> d, c >> d]`` reconverges in d. Two different nodes of one name both stay, for the recipe to
refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

Part = Union["Node", "Piece", Sequence["Node | Piece"]]


class Node:
    """What can stand in a graph: anything with a `name` that derives from this for its ``>>``."""

    name: str

    def __rshift__(self, other: Part) -> Piece:
        return join(piece(self), other)

    def __rrshift__(self, other: Part) -> Piece:
        return join(piece(other), self)


@dataclass(frozen=True)
class Piece:
    """Some nodes and how they follow each other.

    Attributes:
        nodes: in the order in which they were written.
        edges: (source, target), indices into `nodes`, in the order in which they were written.
        heads, tails: indices of the nodes at which a piece joined before or behind this one is attached.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...] = ()
    heads: tuple[int, ...] = ()
    tails: tuple[int, ...] = ()

    def __rshift__(self, other: Part) -> Piece:
        return join(self, other)

    def __rrshift__(self, other: Part) -> Piece:
        return join(piece(other), self)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    def sources(self, index: int) -> tuple[int, ...]:
        return tuple(s for s, t in self.edges if t == index)

    def targets(self, index: int) -> tuple[int, ...]:
        return tuple(t for s, t in self.edges if s == index)


def piece(part: Part) -> Piece:
    """A node, a piece, or a list of these, as one piece.

    Raises:
        TypeError: something that is neither, or an empty list.
    """
    if isinstance(part, Piece):
        return part
    if isinstance(part, Node):
        return Piece((part,), (), (0,), (0,))
    if isinstance(part, list | tuple):
        if not part:
            raise TypeError("a list in a graph must hold at least one stage, is empty")
        merged = piece(part[0])
        for other in part[1:]:
            merged = _beside(merged, piece(other))
        return merged
    raise TypeError(f"a graph is made of stages, filters and lists of these, not of {type(part).__name__}")


def join(left: Piece, right: Part) -> Piece:
    """Every tail of `left` leads to every head of `right`."""
    after = piece(right)
    nodes, where = _merge(left.nodes, after.nodes)
    edges = list(left.edges)
    edges += [(tail, where[head]) for tail in left.tails for head in after.heads]
    edges += [(where[s], where[t]) for s, t in after.edges]
    return Piece(nodes, tuple(dict.fromkeys(edges)), left.heads, tuple(dict.fromkeys(where[t] for t in after.tails)))


def _beside(one: Piece, other: Piece) -> Piece:
    nodes, where = _merge(one.nodes, other.nodes)
    edges = dict.fromkeys([*one.edges, *((where[s], where[t]) for s, t in other.edges)])
    heads = dict.fromkeys([*one.heads, *(where[h] for h in other.heads)])
    tails = dict.fromkeys([*one.tails, *(where[t] for t in other.tails)])
    return Piece(nodes, tuple(edges), tuple(heads), tuple(tails))


def _merge(nodes: tuple[Node, ...], more: tuple[Node, ...]) -> tuple[tuple[Node, ...], list[int]]:
    """All nodes, each once, and where each of `more` is now."""
    merged, where = list(nodes), []
    for node in more:
        place = next((k for k, known in enumerate(merged) if known is node or known == node), None)
        if place is None:
            place = len(merged)
            merged.append(node)
        where.append(place)
    return tuple(merged), where


__all__ = ["Node", "Part", "Piece", "join", "piece"]

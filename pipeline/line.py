"""A line: one stage as the campaign sees it, with what waits for it and who works on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .claims import Claims, Request
from .plan import Plan, ranks_of
from .scheduling import Load, room
from .stream import Stream, Ticket

if TYPE_CHECKING:
    from ..stages.stage import Stage
    from .shift import Shift

#: The producer of the heads' streams. No stage has this name: names have no slash.
INPUT = "/input"

#: A budget is not halved below so many atoms.
LEAST_ATOMS = 64


class Line:
    """One stage's stream, gangs and budget.

    Args:
        name, stage: of the node.
        height: distance to the end of the graph.
        producers: stages that feed it; none for one that is fed by the input only.
        capacity: of its stream.
        max_atoms: room aboard one rank.
    """

    def __init__(
        self, name: str, stage: Stage, height: int, producers: Iterable[str], capacity: int, max_atoms: int
    ) -> None:
        self.name, self.stage, self.height = name, stage, height
        self.size = ranks_of(stage)
        self.stream = Stream(name, producers, capacity)
        self.outlets: list[Line] = []
        self.shifts: list[Shift] = []
        self.request: Request | None = None
        self.max_atoms = max_atoms
        self.ended = False
        self.form_failures = 0

    # --- what it wants ---------------------------------------------------------------------------------------

    @property
    def is_held_back(self) -> bool:
        """Whether a stage behind it has enough waiting."""
        return any(outlet.stream.is_full for outlet in self.outlets)

    @property
    def wants_gang(self) -> bool:
        """Whether another gang would have something to do."""
        return len(self.stream) > 0 and not self.is_held_back

    @property
    def is_over(self) -> bool:
        """Nothing waits, nothing is aboard, and nothing will come."""
        return self.stream.is_ended and not self.shifts

    # --- who gets what -------------------------------------------------------------------------------------------

    def load(self, claims: Claims, nearer: int = 0) -> Load:
        """What there is to share, and between how many; `nearer` ranks are held by stages nearer the end."""
        return Load(
            waiting=self.stream.n_atoms,
            aboard=sum(shift.n_atoms for shift in self.shifts),
            # Ranks that stages in front of this one hold come free in time, and then want something to be left.
            servers=max(len(self.shifts), (claims.size - nearer) // self.size, 1),
        )

    def budget(self, n_ranks: int) -> int:
        """Atoms that one gang of this stage has room for."""
        return self.max_atoms * n_ranks

    @property
    def ranks_held(self) -> int:
        return sum(len(shift.claim.ranks) for shift in self.shifts)

    def share(self, claims: Claims, nearer: int, aboard: int) -> list[Ticket]:
        """What a gang that has so many atoms aboard should take in now; for `nearer` see `load`."""
        space = room(self.load(claims, nearer), aboard, self.budget(self.size))
        return self.stream.take(space) if space > 0 or not aboard else []

    def halve_budget(self, n_atoms: int) -> bool:
        """Memory ran out with so many atoms on a rank. False where nothing smaller makes sense."""
        less = min(self.max_atoms, n_atoms) // 2
        if less < LEAST_ATOMS:
            return False
        self.max_atoms = less
        return True

    def __repr__(self) -> str:
        return f"Line({self.name!r}, {self.stream!r}, {len(self.shifts)} gangs)"


def build_lines(plan: Plan, capacity: int, max_atoms: int) -> dict[str, Line]:
    """The lines of a plan, upstream ones first. Those at a head are fed by the `INPUT`."""
    lines = {
        name: Line(name, stage, plan.height(name), plan.producers(name) or (INPUT,), capacity, max_atoms)
        for name, stage in plan.stages.items()
    }
    for name, line in lines.items():
        line.outlets = [lines[target] for target in plan.stages_behind(name)]
    return lines


__all__ = ["INPUT", "Line", "build_lines"]

"""How a model's reach is served on several ranks: which ghosts a domain sees, which pairs are listed, what travels.

All strategies run on the same machinery (halo plan, packed exchange, fold); they differ in a few numbers only:

| name | ghosts of a domain | list | receivers | between layers |
|---|---|---|---|---|
| pairs | from its upper side only, within cutoff + skin | half: each pair once over all ranks | owned | - |
| wide | within hops x cutoff + skin | full, cutoff + skin | owned, and near ghosts | ghosts compute their own |
| refresh | within cutoff + skin | full, cutoff + skin | owned | owners send theirs |
| graph | all other atoms of the system | none, the model's own | owned | owners send theirs |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from .models.base import Model

Pairs = Literal["half", "full", "none"]
Name = Literal["pairs", "wide", "refresh", "graph"]
Choice = Literal["auto", "pairs", "wide", "refresh", "graph"]


@dataclass(frozen=True)
class Strategy:
    """What domains of one model need of each other.

    Attributes:
        name: see the table above.
        pairs: kind of neighbour list.
        cutoff: Å, pairs farther apart do not interact.
        margin: Å, how far an owned atom's forces and energy look; a domain sees its ghosts that far, plus the skin.
        receivers: Å beyond a domain up to which ghosts receive messages themselves, the skin not counted.
        skin: Å.
        everything: whether a domain sees all other atoms of its system, whatever the distance.
        refreshes: whether features of ghosts come from their owners.
        folds: whether the model leaves forces on ghosts, to be added to the owners'.
    """

    name: Name
    pairs: Pairs
    cutoff: float
    margin: float
    receivers: float
    skin: float
    everything: bool = False
    refreshes: bool = False
    folds: bool = True

    @property
    def reach(self) -> float:
        """Å: how far a domain sees, and the least thickness of one along a periodic axis."""
        # A domain that sees everything may be as thin as it likes; a grid still wants to divide by something.
        return 1e-3 if self.everything else self.margin + self.skin

    @property
    def one_sided(self) -> bool:
        """Whether a pair across a cut is seen by one of the two ranks only."""
        return self.pairs == "half"

    @property
    def folds_energies(self) -> bool:
        """Whether energies of pairs across a cut have a half that belongs to the other rank."""
        return self.pairs == "half"

    @property
    def ghost_work(self) -> float:
        """Work on an atom within reach on either side of a domain, as a share of that on an own atom: roughly."""
        if self.everything:
            return 0.0
        if self.one_sided:
            return 0.15
        # Ghosts that receive messages cost as much as own atoms, the others their exchange.
        return 0.3 + 0.7 * self.receivers / self.margin

    @property
    def ranges(self) -> tuple[float, ...]:
        """Å: distances that must never be outrun between two rebuilds."""
        if self.everything:
            return (0.0,)
        return (self.cutoff,) if self.margin == self.cutoff else (self.cutoff, self.margin)

    def __str__(self) -> str:
        if self.everything:
            return f"{self.name}: every rank sees the whole system"
        hops = f"{self.margin / self.cutoff:.0f} x " if self.margin > self.cutoff else ""
        return f"{self.name}: {hops}cutoff {self.cutoff:g} Å + skin {self.skin:g} Å"


def strategy_for(model: Model, skin: float, choice: Choice = "auto") -> Strategy:
    """The strategy of a model.

    Args:
        model: its `pairs`, `hops`, `cutoff`, `refreshes` and `folds_ghosts` are looked at.
        skin: Å.
        choice: ``auto``: graph networks that can refresh their ghosts do, the others see `hops` times the cutoff. Or
            the name of one that the model can be served by.

    Raises:
        ValueError: one that the model can't be served by, and which it can.
    """
    possible = _possible(model)
    if choice not in get_args(Choice):
        raise ValueError(f"strategy must be one of {', '.join(get_args(Choice))}, is {choice!r}")
    if choice != "auto" and choice not in possible:
        raise ValueError(
            f"strategy {choice!r} does not suit this model (pairs={model.pairs!r}, hops={model.hops}, "
            f"refreshes={model.refreshes}); it can have: {', '.join(possible)}"
        )
    name = possible[0] if choice == "auto" else choice
    if name == "graph":
        return Strategy("graph", "none", model.cutoff, 0.0, 0.0, skin, True, True, model.folds_ghosts)
    hops = 1 if name == "refresh" else model.hops
    return Strategy(
        name,
        model.pairs,
        cutoff=model.cutoff,
        margin=hops * model.cutoff,
        receivers=(hops - 1) * model.cutoff,
        skin=skin,
        refreshes=name == "refresh",
        folds=model.folds_ghosts,
    )


def _possible(model: Model) -> tuple[Name, ...]:
    """Names of the strategies that serve a model, the preferred one first."""
    if model.pairs not in get_args(Pairs):
        raise ValueError(f"a model's `pairs` must be one of {', '.join(get_args(Pairs))}, is {model.pairs!r}")
    if model.pairs == "none":
        return ("graph",)
    if model.pairs == "half":
        if model.hops != 1:
            raise ValueError(f"a model on half lists has no message passing: hops must be 1, is {model.hops}")
        return ("pairs",)
    if model.hops == 1:
        return ("wide",)
    return ("refresh", "wide") if model.refreshes else ("wide",)


__all__ = ["Choice", "Pairs", "Strategy", "strategy_for"]

"""Ensembles: what is held constant. Values without state; the integrator that samples each is named by it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..domain.runner import Propagator


@dataclass(frozen=True)
class Ensemble:
    """What is held constant while a stage runs.

    Attributes:
        target: temperature that is held, K, or None where none is.
        damping: friction, 1/ps, of a thermostat that has one.
        conserves_momentum: whether the total momentum is a constant of the motion: then it carries no temperature, and
            there are 3N - 3 degrees of freedom, else 3N.
    """

    @property
    def target(self) -> float | None:
        return None

    @property
    def damping(self) -> float:
        return 0.0

    @property
    def conserves_momentum(self) -> bool:
        return False

    def propagator(self) -> Propagator:
        raise NotImplementedError(f"{type(self).__name__} must name its integrator")


@dataclass(frozen=True)
class NVE(Ensemble):
    """Constant number, volume and energy: velocity Verlet."""

    @property
    def conserves_momentum(self) -> bool:
        return True

    def propagator(self) -> Propagator:
        from .integrators.verlet import VelocityVerlet

        return VelocityVerlet()


@dataclass(frozen=True)
class NVT(Ensemble):
    """Constant number, volume and temperature: Langevin dynamics, BAOAB (Leimkuhler & Matthews 2013).

    Args:
        temperature: K, zero or more (zero: friction without noise).
        friction: 1/ps, zero or more; 1/ps is gentle enough for diffusion to stay within a few per cent in a solid or
            a simple liquid, and equilibrates within some ps.
    """

    temperature: float
    friction: float = 1.0

    def __post_init__(self) -> None:
        require(self.temperature, "temperature", "K")
        require(self.friction, "friction", "1/ps")

    @property
    def target(self) -> float:
        return float(self.temperature)

    @property
    def damping(self) -> float:
        return float(self.friction)

    def propagator(self) -> Propagator:
        from .integrators.langevin import Langevin

        return Langevin()


@dataclass(frozen=True)
class NPT(Ensemble):
    """Constant number, pressure and temperature. Not there yet: constructing one says so."""

    temperature: float
    pressure: float = 0.0

    def __post_init__(self) -> None:
        raise NotImplementedError(
            "mm.NPT is not implemented yet: relax the cell with mm.Relax(cell='isotropic'), run mm.NVT at that volume"
        )


def require(value: float, name: str, unit: str, *, positive: bool = False) -> None:
    """Refuse a parameter that is not a finite number >= 0 (> 0 if `positive`)."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (positive and value == 0):
        bound = "greater than 0" if positive else "0 or more"
        raise ValueError(f"{name} must be a number {bound} ({unit}), is {value!r}")


def require_ensemble(ensemble: object) -> None:
    """Refuse what is no ensemble."""
    if not isinstance(ensemble, Ensemble):
        raise ValueError(f"ensemble must be one such as mm.NVT(300) or mm.NVE(), is {ensemble!r}")


def require_count(value: int, name: str, least: int = 1) -> None:
    """Refuse a count that is not a whole number >= least."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, is {value!r}")


__all__ = ["NPT", "NVE", "NVT", "Ensemble", "require", "require_count", "require_ensemble"]

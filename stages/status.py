"""How a visit ends: one word per visit, with a reason where it is not plain success."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """How one system's passage through one stage ended."""

    converged = "converged"
    unconverged = "unconverged"
    equilibrated = "equilibrated"
    unequilibrated = "unequilibrated"
    finished = "finished"
    filtered = "filtered"
    failed = "failed"
    quarantined = "quarantined"

    @property
    def goes_on(self) -> bool:
        """Whether the system moves to the next stage (`strict=True` of a campaign stops the two `un…` as well)."""
        return self not in (Status.filtered, Status.failed, Status.quarantined)


__all__ = ["Status"]

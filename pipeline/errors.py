"""What can go wrong with a recipe or a campaign, by name."""

from __future__ import annotations

from typing import Any


class RecipeError(ValueError):
    """A recipe cannot be right as it stands; the message says what to change."""


class CampaignError(RuntimeError):
    """A campaign cannot start or cannot go on; the message says why, and what to do."""


class StaleClaim(RuntimeError):
    """A task of a claim that is over: Dask ran it late or again, and it has done nothing."""

    def __init__(self, claim: int, epoch: int, seated: int | None) -> None:
        self.claim, self.epoch, self.seated = claim, epoch, seated
        now = "holds no such claim" if seated is None else f"is at epoch {seated}"
        super().__init__(f"claim {claim} of epoch {epoch} is over: this rank {now}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.claim, self.epoch, self.seated)


class GangLost(RuntimeError):
    """A gang cannot go on, through no fault of the campaign's: its ranks are given back, its systems restart.

    Attributes:
        phase: forming, receiving, advancing, leaving or dissolving.
        dead: addresses of ranks that are gone; empty when an error came from a living rank.
    """

    def __init__(self, phase: str, reason: str, dead: tuple[str, ...] = ()) -> None:
        self.phase, self.reason, self.dead = phase, reason, dead
        super().__init__(f"lost while {phase}: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.phase, self.reason, self.dead)


__all__ = ["CampaignError", "GangLost", "RecipeError", "StaleClaim"]

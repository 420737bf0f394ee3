"""How a campaign is run, apart from what it does: numbers that a user may turn, with their units and bounds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import CampaignError
from .gang import Limits

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True)
class Options:
    """Options of `Recipe.run`.

    Args:
        segment_seconds: how long a gang works between two reports.
        checkpoint_seconds: how often a gang writes the states of what is aboard; a death costs at most so much.
        max_failure_rate: above this part of failed visits the campaign stops; counted after `failure_visits` visits.
        max_atoms: room aboard one rank; a larger system goes alone.
        strict: whether `unconverged` and `unequilibrated` systems stop, too.
        device: ``auto`` (CUDA where a rank sees a device), ``cpu``, ``cuda:0``.
        capacity: systems that may wait for a stage before the one in front of it is held back.
        patience: seconds after which a stage that waits for several ranks has ranks kept for it.
        worker_seconds: how long to wait for ranks that are not there (yet, or any more).
        summary_seconds: how often summary.nc is rewritten.
        limits: of single waits.
    """

    segment_seconds: float = 5.0
    checkpoint_seconds: float = 60.0
    max_failure_rate: float = 0.5
    failure_visits: int = 20
    max_atoms: int = 50_000
    strict: bool = False
    device: str = "auto"
    capacity: int = 256
    patience: float = 10.0
    worker_seconds: float = 300.0
    summary_seconds: float = 30.0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("segment_seconds", "checkpoint_seconds", "worker_seconds", "summary_seconds"):
            _positive(name, getattr(self, name))
        for name in ("max_atoms", "capacity", "failure_visits"):
            _whole(name, getattr(self, name))
        if not _is_number(self.patience) or self.patience < 0:
            raise CampaignError(f"patience must be 0 seconds or more, is {self.patience!r}")
        if not _is_number(self.max_failure_rate) or not 0 <= self.max_failure_rate <= 1:
            raise CampaignError(f"max_failure_rate must lie between 0 and 1, is {self.max_failure_rate!r}")
        if not isinstance(self.strict, bool):
            raise CampaignError(f"strict must be True or False, is {self.strict!r}")
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise CampaignError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:0', is {self.device!r}")
        if not isinstance(self.limits, Limits):
            raise CampaignError(f"limits must be a mattermill.pipeline.gang.Limits, is {self.limits!r}")
        for limit in fields(self.limits):
            _positive(f"limits.{limit.name}", getattr(self.limits, limit.name))

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """Raises `CampaignError` on an option that is not known: a typo must not pass silently."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(given.keys() - set(known))
        if unknown:
            raise CampaignError(f"unknown option {', '.join(unknown)}: there are {', '.join(known)}")
        return cls(**given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive(name: str, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        raise CampaignError(f"{name} must be more than 0 seconds, is {value!r}")


def _whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CampaignError(f"{name} must be a whole number from 1, is {value!r}")


__all__ = ["Options"]

"""Options: what makes no sense is refused in one sentence that names it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mattermill.pipeline.errors import CampaignError
from mattermill.pipeline.gang import Limits
from mattermill.pipeline.options import Options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", 0),
        ("capacity", 2.5),
        ("max_atoms", 0),
        ("max_atoms", 1.5),
        ("max_atoms", "many"),
        ("max_atoms", True),
        ("failure_visits", 0),
        ("patience", -1),
        ("patience", math.nan),
        ("segment_seconds", 0),
        ("segment_seconds", True),
        ("checkpoint_seconds", -3),
        ("worker_seconds", math.inf),
        ("summary_seconds", "30"),
        ("max_failure_rate", 1.1),
        ("max_failure_rate", None),
        ("strict", "no"),
        ("device", "gpu"),
        ("limits", 30),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(CampaignError, match=rf"^{name} must [^\n]*, is ") as refused:
        Options.of({name: value})
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize("name", ["form", "peer", "segment", "small", "free"])
def test_limits_are_seconds(name: str) -> None:
    with pytest.raises(CampaignError, match=f"limits.{name} must be more than 0 seconds, is 0"):
        Options(limits=Limits(**{name: 0}))


def test_what_makes_sense_is_taken() -> None:
    chosen = Options.of({"capacity": 1, "max_atoms": 1, "patience": 0, "device": "cuda:1", "max_failure_rate": 1})
    assert (chosen.capacity, chosen.device) == (1, "cuda:1")

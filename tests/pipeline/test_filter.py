"""Filters: what an expression may say, what it may never reach, and what a lead answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mattermill as mm
from mattermill.pipeline.expression import Expression, ExpressionError
from mattermill.pipeline.filter import Sieve, judge
from mattermill.stages.reporter import Outcome
from mattermill.stages.status import Status

RESULTS = {"energy": -2.5, "n_atoms": 4, "status": "converged", "temperature": np.float64(300.0), "odd": math.nan}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("energy < -2", True),
        ("energy / n_atoms < -1", False),
        ("-3 < energy <= -2.5", True),
        ("not (n_atoms > 3) or temperature >= 300", True),
        ("status == 'converged' and n_atoms in (4, 8)", True),
        ("abs(energy) > 2 if n_atoms == 4 else False", True),
        ("isfinite(odd)", False),
        ("isfinite(odd) and odd < 0", False),
        ("max(energy, 0) == 0", True),
        ("n_atoms ** 2 % 3 == 1", True),
    ],
)
def test_expressions_equal_python(text: str, expected: bool) -> None:
    assert Expression(text)(RESULTS) is expected
    assert bool(eval(text, {"isfinite": math.isfinite}, dict(RESULTS))) is expected


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "energy.__class__",
        "[x for x in (1, 2)]",
        "(lambda: 1)()",
        "results['energy']",
        "f'{energy}'",
        "open('x')",
        "abs(energy, key=1)",
        "x := 3",
        "energy <",
        "",
        "1j > 0",
        "b'x' == b'x'",
        "a @ b",
        "1 << 1000",
        "-" * 3000 + "1",
        "(" * 100 + "1" + ")" * 100 + "<" + "-" * 60 + "1",
    ],
)
def test_refused_at_construction(text: str) -> None:
    with pytest.raises(mm.RecipeError):
        mm.Filter(text)


def test_no_answer_says_why() -> None:
    with pytest.raises(ExpressionError, match=r"no result named 'enrgy'; there are: energy"):
        Expression("enrgy < 0")(RESULTS)
    for text in ("energy / 0 > 1", "'a' * 1000000000 == ''", "9.0 ** 9999 > 1", "energy < 'x'", "sqrt(energy) > 1"):
        with pytest.raises(ExpressionError):
            Expression(text)(RESULTS)


@pytest.mark.parametrize(
    "text",
    [
        "odd < 0",
        "0 < odd",
        "not odd > 0",
        "-1 < energy + odd < 1",
        "energy < 0 and odd < 0",
        "max(0, odd) == 0",
        "min(odd, 0) == 0",
        "odd in (1, 2)",
        "energy in (odd, 2)",
        "odd",
        "not odd",
        "True if odd else False",
    ],
)
def test_nan_is_no_answer(text: str) -> None:
    with pytest.raises(ExpressionError, match=r"odd.* is NaN, so there is no answer.*isnan"):
        Expression(text)(RESULTS)


def test_nan_can_be_asked_for() -> None:
    assert Expression("isnan(odd) or odd < 0")(RESULTS) is True
    assert Expression("odd < 0 if isfinite(odd) else energy < 0")(RESULTS) is True


def test_a_system_whose_result_is_nan_has_failed_the_filter() -> None:
    answers = judge([Sieve(mm.Filter("pressure < 1", name="calm"))], outcome(pressure=math.nan))
    assert answers["calm"] is not False
    assert "pressure is NaN" in str(answers["calm"])


def test_names_asked_for() -> None:
    assert Expression("abs(energy) > pi and n_atoms < 3").names == {"energy", "n_atoms"}


def test_default_names_differ() -> None:
    assert mm.Filter("n_atoms < 500").name != mm.Filter("n_atoms > 500").name
    assert "/" not in mm.Filter("energy / n_atoms < -1").name


def outcome(**results: Any) -> Outcome:
    return Outcome("ar", Status.converged, steps=10, n_atoms=4, results=results)


def broken(results: Any) -> bool:
    raise KeyError("nothing here")


def test_a_lead_answers_along_the_chain() -> None:
    behind = Sieve(mm.Filter("n_atoms == 4", name="four"))
    sieves = [
        Sieve(mm.Filter("energy < 0", name="bound"), (behind,)),
        Sieve(mm.Filter("energy > 0", name="loose"), (Sieve(mm.Filter("n_atoms > 0", name="never")),)),
        Sieve(mm.Filter("missing > 0", name="typo")),
        Sieve(mm.Filter(broken, name="own")),
        Sieve(mm.Filter(lambda r: r["system"] == "ar", name="lambda")),
    ]
    answers = judge(sieves, outcome(energy=-1.0))
    assert answers["bound"] is True
    assert answers["four"] is True
    assert answers["loose"] is False
    assert "never" not in answers
    assert "no result named 'missing'" in str(answers["typo"])
    assert "raised KeyError" in str(answers["own"])
    assert answers["lambda"] is True

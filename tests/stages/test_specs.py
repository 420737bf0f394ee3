"""Stages and ensembles are values that refuse nonsense when they are built."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys

import pytest

import mattermill as mm


def test_names_default_to_the_class_and_values_compare() -> None:
    assert mm.Relax().name == "relax"
    assert mm.Heat(50, 300).name == "heat"
    assert mm.Equilibrate(mm.NVT(300), steps=10).name == "equilibrate"
    stage = mm.Produce(mm.NVE(), steps=20_000, every=100, name="produce-300K", ranks=2)
    assert (stage.name, stage.ranks, stage.frames_every) == ("produce-300K", 2, 100)
    assert stage == pickle.loads(pickle.dumps(stage))
    assert stage != dataclasses.replace(stage, steps=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stage.steps = 3  # type: ignore[misc]


def test_equilibrate_takes_either_name_for_its_length() -> None:
    assert mm.Equilibrate(mm.NVT(300), steps=7).length() == mm.Equilibrate(mm.NVT(300), max_steps=7).length() == 7


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: mm.Relax(fmax=0), "fmax"),
        (lambda: mm.Relax(fmax="0.1"), "fmax"),
        (lambda: mm.Relax(cell="cubic"), "isotropic"),
        (lambda: mm.Relax(max_steps=0), "max_steps"),
        (lambda: mm.Relax(pressure=1.0), "isotropic"),
        (lambda: mm.Relax(cell="isotropic", smax=-1), "smax"),
        (lambda: mm.Relax(ranks=0), "ranks"),
        (lambda: mm.Relax(ranks="all"), "ranks"),
        (lambda: mm.Relax(name="a/b"), "name"),
        (lambda: mm.Relax(name="../x"), "name"),
        (lambda: mm.Heat(start=-1, stop=300), "start"),
        (lambda: mm.Heat(start=1, stop=float("nan")), "stop"),
        (lambda: mm.Heat(start=1, stop=2, steps=1.5), "steps"),
        (lambda: mm.Heat(start=1, stop=2, dt=0), "dt"),
        (lambda: mm.Heat(start=1, stop=2, friction=0), "friction"),
        (lambda: mm.Equilibrate(mm.NVT(300)), "steps"),
        (lambda: mm.Equilibrate(mm.NVT(300), steps=1, max_steps=2), "not both"),
        (lambda: mm.Equilibrate(300, steps=1), "mm.NVT"),
        (lambda: mm.Produce(mm.NVE, steps=1), "mm.NVE"),
        (lambda: mm.Produce(mm.NVE(), steps=0), "steps"),
        (lambda: mm.Produce(mm.NVE(), every=-1), "every"),
        (lambda: mm.Produce(mm.NVE(), thermo_every=-1), "thermo_every"),
        (lambda: mm.Produce(mm.NVE(), velocities=1), "velocities must be True or False"),
        (lambda: mm.Relax(forces="yes"), "forces must be True or False"),
        (lambda: mm.Produce(mm.NVE(), steps=None), "steps"),
        (lambda: mm.Equilibrate(mm.NVE(), steps=5, dt=0), "dt"),
        (lambda: mm.Heat(start=1, stop=2, every=-1), "every"),
        (lambda: mm.NVT(-1), "temperature"),
        (lambda: mm.NVT(300, friction=-1), "friction"),
        (lambda: mm.NVT(True), "temperature"),
    ],
)
def test_nonsense_is_refused_with_the_parameter_named(build, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=says):
        build()


def test_what_a_trajectory_keeps_is_said_by_the_stage() -> None:
    stages = (mm.Relax, lambda **k: mm.Heat(1, 2, **k), lambda **k: mm.Equilibrate(mm.NVE(), 3, **k))
    for make in (*stages, lambda **k: mm.Produce(mm.NVE(), **k)):
        assert make().frame_fields == ("positions",)
        assert make(velocities=True).frame_fields == ("positions", "velocities")
        assert make(forces=True).frame_fields == ("positions", "forces")
        assert make(velocities=True, forces=True).frame_fields == ("positions", "velocities", "forces")


def test_a_third_positional_argument_is_refused() -> None:
    """Is it dt or every? Heat's friction is not to be taken for dt either."""
    for build in (lambda: mm.Produce(mm.NVE(), 10, 2), lambda: mm.Heat(1, 2, 10, 2.0)):
        with pytest.raises(TypeError, match="positional"):
            build()


def test_what_is_not_there_yet_says_so() -> None:
    with pytest.raises(NotImplementedError, match="isotropic"):
        mm.NPT(300, pressure=0.0)
    with pytest.raises(NotImplementedError, match="isotropic"):
        mm.Relax(cell="full")


def test_specs_need_neither_warp_nor_ase() -> None:
    code = (
        "import sys, mattermill as mm; mm.Relax() >> mm.Heat(1, 2) >> mm.Produce(mm.NVT(3));"
        "print(sorted({'warp', 'ase', 'scipy', 'dask', 'vesin'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.strip() == "[]"

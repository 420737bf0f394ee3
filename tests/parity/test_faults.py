"""Every comparison can fail: a fault put into the machinery turns it red.

Each fault is put into the modules of the rank processes for one run, and taken out again.
"""

from __future__ import annotations

import dataclasses

import pytest
from parity import cases, table
from parity.journey import travel
from parity.test_corners import strain

from mattermill.stages.integrators.verlet import VelocityVerlet

STEPS = 45


def go(mesh, name, grid=None, on_step=None, fault=None):
    """A hot cube, cut in two, for some steps."""
    import torch

    kind = table.MODELS[name]
    whole = cases.with_fields({"cubic": kind.shapes["cubic"](kind.reach)})
    model = kind.make(torch.float64)
    undo = [] if fault is None else fault(mesh)
    try:
        return travel(
            mesh, model, whole, VelocityVerlet(), steps=STEPS, on_step=on_step, strategy=kind.strategy, skin=kind.skin,
            grid=grid,
        )[0]  # fmt: skip
    finally:
        for owner, attribute, value in undo:
            setattr(owner, attribute, value)


def replaced(owner, attribute, make):
    """Put `make(original)` in its place; what undoes it."""
    original = getattr(owner, attribute)
    setattr(owner, attribute, make(original))
    return [(owner, attribute, original)]


def drop_a_ghost(mesh):
    """The first ghost of each domain is forgotten."""
    from mattermill.domain import halo

    def fewer(whole):
        def ghosts(*args):
            atoms, shifts = whole(*args)
            return atoms[1:], shifts[1:]

        return ghosts

    return replaced(halo, "ghosts", fewer)


def swap_left_and_right(mesh):
    """Ghosts appear on the wrong side of the cell."""
    from mattermill.domain import halo

    def mirrored(whole):
        def ghosts(*args):
            atoms, shifts = whole(*args)
            return atoms, -shifts

        return ghosts

    return replaced(halo, "ghosts", mirrored)


def skip_a_fold(mesh):
    """What stands on ghosts in the fifth step is lost."""
    from mattermill.domain.exchange import Exchange

    def lossy(whole):
        calls = []

        def finish_fold(self, forces, energies):
            calls.append(None)
            if len(calls) == 5:
                self.mesh.finish()
            else:
                whole(self, forces, energies)

        return finish_fold

    return replaced(Exchange, "finish_fold", lossy)


def keep_an_old_cell(mesh):
    """Ghosts are shifted by the cell of the beginning."""
    from mattermill.domain.exchange import Exchange

    cells = []

    def stale(whole):
        def begin(self, positions, now, header):
            cells.append(now.clone())
            return whole(self, positions, cells[0], header)

        return begin

    return replaced(Exchange, "begin", stale)


def never_rebuild(mesh):
    """Lists and ghosts stay those of the beginning."""
    import numpy as np

    from mattermill.domain.aboard import Aboard

    return replaced(Aboard, "_arrived", lambda whole: lambda self: np.minimum(whole(self), 1.0))


def skip_a_feature_refresh(mesh):
    """One exchange of features, in the third step, does not take place: ghosts keep what they have."""
    from mattermill.domain.features import Features

    def lossy(whole):
        calls = []

        def spread(self, features):
            calls.append(None)
            if len(calls) != 6:
                return whole(self, features)
            self.calls += 1  # or the model would be told that it never asked
            return features

        return spread

    return replaced(Features, "spread", lossy)


def skip_the_adjoint(mesh):
    """Gradients on ghosts do not go home."""
    from mattermill.domain.features import Features

    def lossy(whole):
        def fold(self, features):
            whole(self, features)
            features = features.clone()
            features[self.n_owned :] = 0.0
            return features

        return fold

    return replaced(Features, "_fold", lossy)


def trim_receivers(mesh):
    """Ghosts whose messages an owned atom needs receive none themselves."""
    import numpy as np

    from mattermill.domain import resident

    def trimmed(whole):
        def plan_halo(*args):
            found = whole(*args)
            return dataclasses.replace(found, receivers=np.zeros_like(found.receivers))

        return plan_halo

    return replaced(resident, "plan_halo", trimmed)


FAULTS = [
    ("lj-switch", drop_a_ghost, None),
    ("lj-switch", swap_left_and_right, None),
    ("lj-switch", skip_a_fold, None),
    ("lj-switch", keep_an_old_cell, strain),
    ("lj-switch", never_rebuild, None),
    ("mp-wide", drop_a_ghost, None),
    ("mp-wide", skip_a_fold, None),
    ("mp-wide", keep_an_old_cell, strain),
    ("mp-wide", trim_receivers, None),
    ("mp-refresh", drop_a_ghost, None),
    ("mp-refresh", swap_left_and_right, None),
    ("mp-refresh", never_rebuild, None),
    ("mp-refresh", skip_a_feature_refresh, None),
    ("mp-refresh", skip_the_adjoint, None),
    ("mp-graph", keep_an_old_cell, strain),
    ("mp-graph", skip_a_feature_refresh, None),
    ("mp-graph", skip_the_adjoint, None),
    ("mp-graph", skip_a_fold, None),
]


@pytest.mark.parametrize(("name", "fault", "on_step"), FAULTS, ids=lambda v: getattr(v, "__name__", v))
def test_a_fault_turns_it_red(ranks, name, fault, on_step):
    expected = go(None, name, on_step=on_step)
    got = ranks.run(go, 2, name, (2, 1, 1), on_step, fault)[0]
    assert cases.worst(got, expected, "positions") > 1e-8
    # And once it is taken out again, all is well.
    got = ranks.run(go, 2, name, (2, 1, 1), on_step)[0]
    assert max(cases.differences(got, expected).values()) < 1e-9

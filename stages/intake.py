"""What a system must be to enter a stage, and how its visit begins. On the lead; nothing here is collective."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..domain.batch import Batch
from ..domain.fields import FIELDS, REQUIRED, is_own_name
from .fields import without_visit

if TYPE_CHECKING:
    from ..domain.models.base import Model
    from ..domain.runner import Propagator
    from .stage import Stage

#: Atoms nearer than this share a site, Å.
SAME_SITE = 0.1


def reasons_to_refuse(batch: Batch, stage: Stage, model: Model) -> dict[str, str]:
    """By id, why systems cannot enter; the first reason found of each."""
    reasons: dict[str, str] = {}
    for single in batch.to("cpu").split():
        reason = why_not(single, model)
        if reason is None:
            reason = stage.check(single).get(single.ids[0])
        if reason is not None:
            reasons[single.ids[0]] = reason
    return reasons


def why_not(single: Batch, model: Model) -> str | None:
    """Why no stage could bear this one system with this model; None if it can."""
    checks: tuple[Callable[[Batch, Model], str | None], ...] = (_complete, _finite, _species, _geometry)
    return next((reason for check in checks if (reason := check(single, model)) is not None), None)


def _complete(single: Batch, model: Model) -> str | None:
    missing = [name for name in REQUIRED if name not in single]
    if missing:
        return f"lacks the fields {', '.join(missing)}"
    if single.n_atoms == 0:
        return "has no atoms"
    if len(np.unique(single.atom_id.numpy())) != single.n_atoms:
        return "atom_id must differ between the atoms of a system"
    return None


def _finite(single: Batch, model: Model) -> str | None:
    for name in ("positions", "velocities", "masses", "cell"):
        if name in single and not bool(torch.isfinite(getattr(single, name)).all()):
            if name == "cell":
                return "the cell is not finite"
            bad = torch.isfinite(getattr(single, name)).reshape(single.n_atoms, -1).all(dim=1)
            return f"{name} must be finite, are not for atom {int((~bad).nonzero()[0])}"
    if bool((single.masses <= 0).any()):
        return f"masses must be greater than 0, the smallest is {float(single.masses.min()):g} amu"
    return None


def _species(single: Batch, model: Model) -> str | None:
    unknown = model.unknown_species(single.numbers.unique().tolist())
    return f"the model does not know {', '.join(unknown)}" if unknown else None


def _geometry(single: Batch, model: Model) -> str | None:
    from ..domain.neighbors import overlapping_pairs

    try:
        pairs = overlapping_pairs(single.positions.numpy(), single.cell[0].numpy(), single.pbc[0].numpy(), SAME_SITE)
    except ValueError as error:
        return str(error)
    if not pairs:
        return None
    i, j, distance = pairs[0]
    others = f" (and {len(pairs) - 1} more pairs)" if len(pairs) > 1 else ""
    if i == j:
        return f"atom {i} lies {distance:.2g} Å from its own image: a lattice vector is that short{others}"
    return f"atoms {i} and {j} share a site: {distance:.2g} Å apart, at least {SAME_SITE} Å are needed{others}"


def is_under_way(batch: Batch, key: int) -> np.ndarray:
    """Which systems are in the middle of a visit of the stage with this key: bool (systems,)."""
    if "visit" not in batch:
        return np.zeros(len(batch), dtype=bool)
    return batch.visit.cpu().numpy() == key


def begin(batch: Batch, stage: Stage, propagator: Propagator, seed: int) -> Batch:
    """Fresh systems at the start of their visit: step 0, the stage's fields and the propagator's memory in place."""
    return propagator.prepare(stage.prepare(without_visit(_without_clashes(batch)), seed))


def _without_clashes(batch: Batch) -> Batch:
    """The batch without arrays of the user's that are named like a field of a stage.

    Intake leaves them out, too (`is_own_name`), unless structures were read before `stages` was imported.
    """
    stores = {"atom": batch.atoms, "system": batch.systems}
    names = [n for per, store in stores.items() for n in store if is_own_name(n) and FIELDS[n].per != per]
    if names:
        warnings.warn(f"not taken along: {', '.join(names)} (a stage needs the name: choose another one)", stacklevel=2)
    return batch.without(names)


__all__ = ["SAME_SITE", "begin", "is_under_way", "reasons_to_refuse", "why_not"]

"""Final structures of a campaign in one file that other programs read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from .atomic import replacing
from .folder import Folder
from .ledger import Ledger, Visit
from .view import CampaignView

if TYPE_CHECKING:
    from ase import Atoms

_NO_RESULT = {"failed", "quarantined"}


def write_final_structures(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], stage: str | None = None
) -> int:
    """Write final structures, in the orientation of the input, with energy and forces where the format has them.

    Args:
        folder: of the campaign.
        out: the file; its ending names the format, as ASE knows it (extxyz, cif, …).
        stage: states at the end of this stage; None: of each system the last that it has, several after a fan-out.

    Returns:
        How many structures were written. Failed systems are not.

    Raises:
        FolderError: no campaign there.
        ValueError: no such stage, a format that cannot hold these structures, or nothing to write.
    """
    view = CampaignView(Folder.open(folder))
    with Ledger.open_readonly(view.folder.ledger) as ledger:
        stages = ledger.stages()
        if stage is not None and stage not in stages:
            raise ValueError(f"no system has been in a stage {stage!r}; stages so far: {', '.join(stages) or 'none'}")
        visits = ledger.visits(stage, done=True) if stage is not None else _last_states(ledger)
    structures = []
    for visit, state in view.states([v for v in visits if v.status not in _NO_RESULT]):
        atoms = state.to_atoms()[0]
        atoms.info.update({"id": visit.system, "stage": visit.stage, "status": visit.status})
        structures.append(atoms)
    if not structures:
        raise ValueError(f"{view.path} has no final structures{f' of {stage!r}' if stage else ''} yet")
    _write(Path(out), structures)
    return len(structures)


def _last_states(ledger: Ledger) -> list[Visit]:
    """Of each branch that a system took, the last visit that left a state; a failed end leaves none to show.

    Filters, and visits that have not ended, have no state of their own: the one before it counts.
    """
    visits = {(v.system, v.stage): v for v in ledger.visits()}
    found: dict[tuple[str, str], Visit] = {}
    for last in ledger.last_visits().values():
        for visit in last:
            here: Visit | None = visit
            while here is not None and not here.state_file and here.status not in _NO_RESULT:
                here = visits.get((here.system, here.parent))
            if here is not None and here.status is not None:
                found[here.system, here.stage] = here
    return list(found.values())


def _write(out: Path, structures: list[Atoms]) -> None:
    from ase.io import write
    from ase.io.formats import UnknownFileTypeError, filetype, get_ioformat

    try:
        form = get_ioformat(filetype(str(out), read=False))
    except UnknownFileTypeError as error:
        raise ValueError(f"{out.name}: ASE knows no format by this ending; use .extxyz, .cif or .traj") from error
    if not form.can_write or (form.single and len(structures) > 1):
        held = "cannot be written" if not form.can_write else f"holds one structure, there are {len(structures)}"
        raise ValueError(f"format {form.name!r} {held}: use .extxyz")
    with replacing(out) as draft:
        write(draft, structures, format=form.name)


__all__ = ["write_final_structures"]

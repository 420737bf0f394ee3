"""Final structures of a campaign in one file that other programs read."""

from __future__ import annotations

import os
from pathlib import Path

from .atomic import replacing
from .folder import Folder
from .ledger import Ledger
from .view import CampaignView

_NO_RESULT = {"failed", "quarantined"}


def write_final_structures(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], stage: str | None = None
) -> int:
    """Write final structures, in the orientation of the input, with energy and forces where the format has them.

    Args:
        folder: of the campaign.
        out: the file; its ending names the format, as ASE knows it (extxyz, cif, …).
        stage: states at the end of this stage; None: of each system the last it ended in, several after a fan-out.

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
        if stage is not None:
            visits = ledger.visits(stage, done=True)
        else:
            visits = [v for last in ledger.last_visits().values() for v in last]
    structures = []
    for visit, state in view.states([v for v in visits if v.status is not None and v.status not in _NO_RESULT]):
        atoms = state.to_atoms()[0]
        atoms.info.update({"id": visit.system, "stage": visit.stage, "status": visit.status})
        structures.append(atoms)
    if not structures:
        raise ValueError(f"{view.path} has no final structures{f' of {stage!r}' if stage else ''} yet")
    _write(Path(out), structures)
    return len(structures)


def _write(out: Path, structures: list) -> None:  # type: ignore[type-arg]
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

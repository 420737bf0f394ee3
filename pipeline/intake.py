"""Intake: what a new campaign writes before anything runs, and what an old one must say before it goes on."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .atomic import write_text
from .errors import CampaignError
from .folder import Folder
from .handoff import write_batch
from .ledger import Entry, Finished, Ledger, Queued, SystemRow

if TYPE_CHECKING:
    from ..domain.batch import Batch
    from ..domain.reading import Structures
    from .recipe import Recipe

logger = logging.getLogger(__name__)

#: Input states go into files of about so many atoms and at most so many systems.
FILE_ATOMS, FILE_SYSTEMS = 200_000, 500

#: Key of the ledger's `meta` that says that all structures are registered.
COMPLETE = "intake"


def structures_of(given: Any) -> Structures:
    """What the user handed over, read."""
    from ..domain.reading import Structures, read

    structures = given if isinstance(given, Structures) else read(given)
    if not structures.ids and not structures.failures:
        raise CampaignError("there are no structures to run: the list or the files are empty")
    return structures


def begin(folder: Folder, recipe: Recipe, structures: Structures) -> Ledger:
    """Write recipe.json, the input states and the ledger of a new campaign; its lock is held.

    Structures that could not be read are visits of the first stage that have failed.
    """
    from ..domain.reading import Structures

    assert isinstance(structures, Structures)
    document = recipe.to_json() | {"created_by": _provenance()}
    write_text(folder.recipe, json.dumps(document, indent=1) + "\n")
    ledger = Ledger.create(folder.ledger)
    heads = recipe.plan.heads
    rows: list[SystemRow] = []
    entries: list[Entry] = []
    for number, batch in enumerate(_chunks(structures.batches)):
        path = folder.handoff_file("input", f"input-{number:05d}")
        digest = write_batch(path, batch)
        for k, system in enumerate(batch.ids):
            n_atoms = int(batch.counts[k])
            rows.append(SystemRow(system, n_atoms, _formula(batch, k), structures.sources.get(system, "")))
            entries += [Queued(system, head, n_atoms, folder.relative(path), digest) for head in heads]
    for system, reason in structures.failures.items():
        rows.append(SystemRow(system, 0, source=structures.sources.get(system, ""), failure=reason))
        for head in heads:
            entries += [Queued(system, head), Finished(system, head, "failed", f"could not be read: {reason}")]
    ledger.add_systems(rows)
    ledger.record(entries)
    ledger.set_meta(COMPLETE, True)
    return ledger


def go_on(folder: Folder, recipe: Recipe | None) -> tuple[Recipe, Ledger]:
    """The recipe and the ledger of a campaign that goes on; its lock is held.

    Raises:
        CampaignError: nothing to go on with, or the recipe is another one than before; says what changed.
        RecipeError: the recipe cannot be had from the folder alone.
    """
    from .recipe import Recipe
    from .recipe_json import differences

    document = stored_recipe(folder)
    if recipe is None:
        recipe = Recipe.from_json(document)
    else:
        changed = differences(document, recipe.to_json())
        if changed:
            raise CampaignError(
                f"this is not the recipe of {folder.path}; changed: {'; '.join(changed[:5])}"
                f"{' …' if len(changed) > 5 else ''}. Resume with the recipe as it was, or run the new one elsewhere"
            )
    ledger = Ledger.open(folder.ledger)
    if not ledger.meta(COMPLETE):
        ledger.close()
        raise CampaignError(
            f"the campaign in {folder.path} ended before its structures were registered: remove the folder and run it "
            "again"
        )
    return recipe, ledger


def sweep(folder: Folder, ledger: Ledger) -> int:
    """Remove states that no visit needs: what gangs wrote whose report came too late. Only under the folder's lock.

    The input and the final states of every stage stay. Returns how many files went.
    """
    used = ledger.files_in_use()
    removed = 0
    for path in (*folder.handoff.rglob("*.npz"), *folder.checkpoints.rglob("*.npz")):
        if folder.relative(path) in used or path.match(f"{folder.handoff.name}/input/input-*.npz"):
            continue
        try:
            path.unlink(missing_ok=True)
            removed += 1
        except OSError as error:
            logger.warning("%s is not needed and cannot be removed: %s", path, error)
    return removed


def stored_recipe(folder: Folder) -> dict[str, Any]:
    """The document recipe.json. Raises `CampaignError` where there is none that can be read."""
    try:
        document = json.loads(folder.recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CampaignError(f"{folder.recipe} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise CampaignError(f"{folder.recipe} holds no recipe")
    return document


def _chunks(batches: list[Batch]) -> Iterator[Batch]:
    from ..domain.batch import Batch

    pile: list[Batch] = []
    atoms = 0
    for batch in batches:
        if pile and (atoms + batch.n_atoms > FILE_ATOMS or len(pile) >= FILE_SYSTEMS):
            yield Batch.concat(pile)
            pile, atoms = [], 0
        pile.append(batch)
        atoms += batch.n_atoms
    if pile:
        yield Batch.concat(pile)


def _formula(batch: Batch, index: int) -> str:
    from ase.formula import Formula

    symbols = batch.select([index]).numbers.tolist()
    from ase.data import chemical_symbols

    counts: dict[str, int] = {}
    for number in symbols:
        name = chemical_symbols[number] if 0 <= number < len(chemical_symbols) else "X"
        counts[name] = counts.get(name, 0) + 1
    return Formula.from_dict(counts).format("hill")


def _provenance() -> dict[str, Any]:
    versions = {}
    for package in ("mattermill", "torch", "warp-lang", "numpy", "distributed"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"versions": versions, "python": sys.version.split()[0], "command": sys.argv}


__all__ = ["begin", "go_on", "stored_recipe", "structures_of", "sweep"]

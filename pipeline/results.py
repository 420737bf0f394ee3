"""What a campaign has found: summary.nc, and the campaign folder as one object to look at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .atomic import replacing
from .folder import Folder, safe_name
from .ledger import Ledger, Visit

if TYPE_CHECKING:
    import xarray

    from .view import CampaignView

#: Key of the ledger's `meta` under which a campaign keeps the units of its stages' own results.
UNITS_KEY = "result_units"
_ALL_UNITS_KEY = "units"
#: Group of the systems as they came in; a stage of this name hides it.
INTAKE = "intake"

_BOOKKEEPING = {
    "n_atoms": ("1", "number of atoms"),
    "attempts": ("1", "times the visit was started"),
    "deaths": ("1", "times its gang died with it aboard"),
    "steps": ("1", "steps done"),
    "seconds": ("s", "share of the wall time"),
}
_TEXT = {
    "status": "how the visit ended; pending or running before that",
    "reason": "why, where it is not plain success",
    "queued": "when it was queued (UTC)",
    "started": "when it was first started (UTC)",
    "ended": "when it ended (UTC)",
}


@dataclass(frozen=True)
class Column:
    """A variable over `system`: float64, int64 or text."""

    values: np.ndarray
    attributes: dict[str, str]


Table = dict[str, Column]


def write_summary(folder: Folder, ledger: Ledger, *, units: Mapping[str, str] | None = None) -> None:
    """Write summary.nc from the ledger: NetCDF-4, a group per stage, dimension `system`, in one step.

    Args:
        folder: the campaign's.
        ledger: open for reading at least.
        units: of results beside those known and those in the ledger's `meta`.

    Raises:
        OSError: no space …; the summary that was there before is untouched.
    """
    import netCDF4

    with replacing(folder.summary) as draft, netCDF4.Dataset(draft, "w", format="NETCDF4") as file:
        file.setncatts(_root_attributes(folder))
        for name, (stage, table) in summary_tables(ledger, units).items():
            _write_group(file.createGroup(name), stage, table)


def summary_tree(folder: Folder, ledger: Ledger) -> xarray.DataTree:
    """The summary as it is now, straight from the ledger: what `write_summary` would write."""
    import xarray

    nodes: dict[str, xarray.Dataset] = {"/": xarray.Dataset(attrs=_root_attributes(folder))}
    for name, (stage, table) in summary_tables(ledger).items():
        variables = {k: ("system", c.values, c.attributes) for k, c in table.items()}
        nodes[f"/{name}"] = xarray.Dataset(variables, attrs={"stage": stage}).set_coords("system")
    return xarray.DataTree.from_dict(nodes, name=folder.path.stem)


def open_campaign(path: str | os.PathLike[str]) -> CampaignView:
    """A campaign folder to look at, during the run and after.

    Raises:
        FolderError: there is no campaign at this path.
    """
    from .view import CampaignView

    return CampaignView(Folder.open(path))


def summary_tables(ledger: Ledger, units: Mapping[str, str] | None = None) -> dict[str, tuple[str, Table]]:
    """Per group (a name that NetCDF allows) the stage and its columns."""
    known = {**_units(ledger), **(units or {})}
    tables = {INTAKE: (INTAKE, _intake_table(ledger))}
    by_stage: dict[str, list[Visit]] = {stage: [] for stage in ledger.stages()}
    for visit in ledger.visits():
        by_stage[visit.stage].append(visit)
    for stage, visits in by_stage.items():
        tables[safe_name(stage)] = (stage, _stage_table(visits, known))
    return tables


def _units(ledger: Ledger) -> dict[str, str]:
    """Units of results: ours, and what a campaign says in its ledger about those of its own stages.

    Kept in the ledger, so that who only looks at a campaign needs not import what computes.
    """
    kept = ledger.meta(_ALL_UNITS_KEY)
    if kept is None:
        from ..stages.result_units import UNITS

        kept = dict(UNITS)
        if not ledger.readonly:
            ledger.set_meta(_ALL_UNITS_KEY, kept)
    return {**kept, **(ledger.meta(UNITS_KEY) or {})}


def _intake_table(ledger: Ledger) -> Table:
    systems = ledger.systems()
    return {
        "system": Column(_text([s.id for s in systems]), {"long_name": "system id"}),
        "n_atoms": Column(np.array([s.n_atoms for s in systems], dtype=np.int64), {"units": "1"}),
        "formula": Column(_text([s.formula for s in systems]), {"long_name": "chemical formula"}),
        "source": Column(_text([s.source for s in systems]), {"long_name": "where it came from"}),
        "status": Column(_text(["failed" if s.failure else "finished" for s in systems]), {"long_name": "intake"}),
        "reason": Column(_text([s.failure or "" for s in systems]), {"long_name": "why it did not enter"}),
    }


def _stage_table(visits: list[Visit], units: Mapping[str, str]) -> Table:
    table: Table = {"system": Column(_text([v.system for v in visits]), {"long_name": "system id"})}
    for name, long_name in _TEXT.items():
        table[name] = Column(_text([_text_of(v, name) for v in visits]), {"long_name": long_name})
    for name, (unit, long_name) in _BOOKKEEPING.items():
        values = _numbers([getattr(v, name) for v in visits])
        table[name] = Column(values, {"units": unit, "long_name": long_name})
    for name in dict.fromkeys(key for v in visits for key in v.results):
        column = _result_column([v.results.get(name) for v in visits], units.get(name))
        if column is not None and name not in table:
            table[name] = column
    return table


def _text_of(visit: Visit, name: str) -> str:
    if name == "status" and visit.status is None:
        return "running" if visit.is_running else "pending"
    return getattr(visit, name) or ""


def _result_column(values: list[Any], unit: str | None) -> Column | None:
    """Numbers or text over the systems; None for what is neither (lists stay in the ledger)."""
    attributes = {"units": unit} if unit else {}
    present = [v for v in values if v is not None]
    if all(isinstance(v, bool | int | float) for v in present):
        return Column(_numbers(values), attributes)
    if all(isinstance(v, str) for v in present):
        return Column(_text([v or "" for v in values]), attributes)
    return None


def _numbers(values: list[Any]) -> np.ndarray:
    """int64 where all are whole numbers, else float64 with NaN for what is missing."""
    if all(isinstance(v, int) for v in values):
        return np.array(values, dtype=np.int64)
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)


def _text(values: list[str]) -> np.ndarray:
    return np.array(values, dtype=object)


def _root_attributes(folder: Folder) -> dict[str, str]:
    return {"Conventions": "CF-1.8", "title": folder.path.stem, "source": "mattermill"}


def _write_group(group: Any, stage: str, table: Table) -> None:
    group.stage = stage
    group.createDimension("system", len(table["system"].values))
    for name, column in table.items():
        kind = str if column.values.dtype == object else column.values.dtype
        variable = group.createVariable(name, kind, ("system",), fill_value=False if kind is not str else None)
        variable.setncatts(column.attributes)
        if name not in ("system", "status", "reason") and column.values.dtype == object:
            variable.coordinates = "system"
        if len(column.values):
            variable[:] = column.values


__all__ = ["Column", "open_campaign", "summary_tables", "summary_tree", "write_summary"]

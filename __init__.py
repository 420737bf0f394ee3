"""mattermill: recipes of simulation stages over thousands of structures, decomposed over every rank you have.

``import mattermill as mm`` reads nothing but this file: each public name is imported when it is first used (PEP 562),
so a script pays for torch when it touches a batch, and for Dask only when it runs a recipe.

Units everywhere a user sees a number: Å, eV, amu, fs, K, GPa, e.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .domain import models
    from .domain.batch import Batch
    from .domain.fields import BatchError, Field, declare_field
    from .domain.hooks import Hook
    from .domain.mesh import Mesh, MeshError, RankFailed
    from .domain.reading import Structures, read
    from .domain.runner import DomainParallel
    from .pipeline.campaign import Campaign, resume
    from .pipeline.errors import CampaignError, RecipeError
    from .pipeline.handoff import DamagedFile
    from .pipeline.lock import LockedError
    from .pipeline.recipe import Filter, Recipe
    from .pipeline.results import open_campaign
    from .stages.ensembles import NPT, NVE, NVT
    from .stages.equilibrate import Equilibrate
    from .stages.heat import Heat
    from .stages.produce import Produce
    from .stages.relax import Relax
    from .stages.simulate import evaluate, relax, simulate
    from .stages.stage import Stage, Status

__version__ = "0.1.0"

#: Module of each public name. The imports above say the same to type checkers; tests/test_package.py compares them.
_HOME = {
    "Batch": ".domain.batch",
    "BatchError": ".domain.fields",
    "Campaign": ".pipeline.campaign",
    "CampaignError": ".pipeline.errors",
    "DamagedFile": ".pipeline.handoff",
    "DomainParallel": ".domain.runner",
    "Equilibrate": ".stages.equilibrate",
    "Field": ".domain.fields",
    "Filter": ".pipeline.recipe",
    "Heat": ".stages.heat",
    "Hook": ".domain.hooks",
    "LockedError": ".pipeline.lock",
    "Mesh": ".domain.mesh",
    "MeshError": ".domain.mesh",
    "NPT": ".stages.ensembles",
    "NVE": ".stages.ensembles",
    "NVT": ".stages.ensembles",
    "Produce": ".stages.produce",
    "RankFailed": ".domain.mesh",
    "Recipe": ".pipeline.recipe",
    "RecipeError": ".pipeline.errors",
    "Relax": ".stages.relax",
    "Stage": ".stages.stage",
    "Status": ".stages.stage",
    "Structures": ".domain.reading",
    "declare_field": ".domain.fields",
    "evaluate": ".stages.simulate",
    "open_campaign": ".pipeline.results",
    "read": ".domain.reading",
    "relax": ".stages.simulate",
    "resume": ".pipeline.campaign",
    "simulate": ".stages.simulate",
}

#: Subpackages that are public names themselves.
_PACKAGES = {"models": ".domain.models", "domain": ".domain", "stages": ".stages", "pipeline": ".pipeline"}

__all__ = [  # noqa: RUF022 (types first, as `_HOME` has them, then functions)
    "Batch",
    "BatchError",
    "Campaign",
    "CampaignError",
    "DamagedFile",
    "DomainParallel",
    "Equilibrate",
    "Field",
    "Filter",
    "Heat",
    "Hook",
    "LockedError",
    "Mesh",
    "MeshError",
    "NPT",
    "NVE",
    "NVT",
    "Produce",
    "RankFailed",
    "Recipe",
    "RecipeError",
    "Relax",
    "Stage",
    "Status",
    "Structures",
    "declare_field",
    "evaluate",
    "models",
    "open_campaign",
    "read",
    "relax",
    "resume",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        value: Any = importlib.import_module(_PACKAGES[name], __name__)
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name], __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

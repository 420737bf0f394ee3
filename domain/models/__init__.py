"""Potentials. Importing this is cheap: a model loads what it needs when it is first asked for.

``mm.models.LennardJones``, ``mm.models.noble_gases``; base classes for a model of your own: `Model`, `ModelOutput`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Model, ModelOutput
    from .lennard_jones import LennardJones
    from .noble import noble_gases

__all__ = ["LennardJones", "Model", "ModelOutput", "noble_gases"]

_HOME = {
    "LennardJones": "lennard_jones",
    "Model": "base",
    "ModelOutput": "base",
    "noble_gases": "noble",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

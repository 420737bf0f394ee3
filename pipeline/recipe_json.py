"""Recipes as JSON and back. A document names only what the package itself registers; it cannot make us import code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from .errors import RecipeError
from .filter import Filter

if TYPE_CHECKING:
    from .recipe import Recipe

VERSION = 1


def registry() -> dict[str, type]:
    """The classes that a document may name: our stages, ensembles and models."""
    from .. import stages
    from ..domain import models

    found: dict[str, type] = {}
    for package in (_public(stages, _STAGES), _public(models, getattr(models, "__all__", ()))):
        for name, value in package.items():
            if isinstance(value, type) and is_dataclass(value):
                found[name] = value
    found["Filter"] = Filter
    return found


#: Where the classes of stages/ live; named here, so that a document can ask for these and no others.
_STAGES = {
    "Relax": "relax",
    "Heat": "heat",
    "Equilibrate": "equilibrate",
    "Produce": "produce",
    "NVE": "ensembles",
    "NVT": "ensembles",
    "NPT": "ensembles",
}


def _public(package: Any, names: Any) -> dict[str, Any]:
    import importlib

    if isinstance(names, dict):
        return {n: getattr(importlib.import_module(f"{package.__name__}.{m}"), n) for n, m in names.items()}
    return {n: getattr(package, n) for n in names}


# --- writing ---------------------------------------------------------------------------------------------------------


def encode_recipe(recipe: Recipe) -> dict[str, Any]:
    plan = recipe.plan
    return {
        "format": "mattermill-recipe",
        "version": VERSION,
        "name": recipe.name,
        "seed": recipe.seed,
        "model": encode(recipe.model),
        "nodes": [{"name": name, **encode(node)} for name, node in plan.nodes.items()],
        "edges": [[source, target] for source, targets in plan.targets.items() for target in targets],
    }


def encode(value: Any) -> Any:
    """A value of a recipe as JSON. What is not of the registry becomes its description, marked as the user's."""
    import numpy as np
    import torch

    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, frozenset | set):
        return {"set": sorted((encode(item) for item in value), key=repr)}
    if isinstance(value, Mapping):
        return {"map": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, Filter):
        kind = "predicate" if isinstance(value.predicate, str) else "function"
        return {"type": "Filter", "fields": {"name": value.name, kind: value.reference}}
    if is_dataclass(value) and not isinstance(value, type):
        return _encode_dataclass(value)
    return {"user": _reference(value), "repr": _describe(value)}


def _encode_dataclass(value: Any) -> dict[str, Any]:
    parameters = {f.name: encode(getattr(value, f.name)) for f in fields(value) if f.init}
    known = registry().get(type(value).__name__) is type(value)
    return {"type" if known else "user": type(value).__name__ if known else _reference(value), "fields": parameters}


def _reference(value: Any) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}:{kind.__qualname__}"


def _describe(value: Any) -> Any:
    """What tells one value of a foreign class from another: a model's identity, else its repr without an address."""
    identity = getattr(value, "identity", None)
    if callable(identity) and not isinstance(value, type):
        return encode(identity())
    text = repr(value)
    return text.split(" at 0x")[0] if " at 0x" in text else text


# --- reading ---------------------------------------------------------------------------------------------------------


def decode_recipe(document: Mapping[str, Any]) -> Recipe:
    from ..stages.graph import Piece
    from .recipe import Recipe

    if not isinstance(document, Mapping) or document.get("format") != "mattermill-recipe":
        raise RecipeError('this is no recipe of mattermill: a recipe.json has "format": "mattermill-recipe"')
    if document.get("version") != VERSION:
        raise RecipeError(f"this recipe has version {document.get('version')}, this mattermill reads {VERSION}")
    try:
        nodes = {str(node["name"]): decode(node) for node in document["nodes"]}
        place = {name: k for k, name in enumerate(nodes)}
        edges = tuple((place[s], place[t]) for s, t in document["edges"])
        model = decode(document["model"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(f"this recipe.json is damaged: {type(error).__name__} {error}") from error
    targets, sources = {t for _, t in edges}, {s for s, _ in edges}
    heads = tuple(k for k in range(len(nodes)) if k not in targets)
    tails = tuple(k for k in range(len(nodes)) if k not in sources)
    graph = Piece(tuple(nodes.values()), edges, heads, tails)
    return Recipe(document["name"], model=model, graph=graph, seed=document["seed"])


def decode(value: Any) -> Any:
    """The value of a piece of JSON.

    Raises:
        RecipeError: it is the user's own code, or nothing that the registry knows.
    """
    import numpy as np
    import torch

    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, Mapping):
        return value
    if "user" in value or "function" in value.get("fields", ()):
        what = value.get("user") or value["fields"]["function"]
        raise RecipeError(
            f"the recipe uses {what}, which is not part of mattermill and is never imported from a campaign's folder: "
            "hand the recipe over again, as `mattermill resume FOLDER --recipe FILE.py` or mm.resume(folder, recipe)"
        )
    if "type" in value:
        return _decode_dataclass(value)
    if "map" in value:
        return {decode(k): decode(v) for k, v in value["map"]}
    if "set" in value:
        return frozenset(decode(item) for item in value["set"])
    if "array" in value:
        return np.array(value["array"], dtype=value["dtype"])
    if "dtype" in value:
        dtype = getattr(torch, str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise RecipeError(f"{value['dtype']!r} is no number type")
        return dtype
    if "float" in value:
        return float(value["float"])
    raise RecipeError(f"a recipe cannot hold {value!r}")


def _decode_dataclass(value: Mapping[str, Any]) -> Any:
    known = registry()
    kind = known.get(value["type"])
    if kind is None:
        raise RecipeError(f"the recipe uses {value['type']!r}, which this version of mattermill does not have")
    parameters = {name: decode(field) for name, field in value["fields"].items()}
    try:
        return kind(**parameters)
    except TypeError as error:
        raise RecipeError(f"{value['type']} of another version of mattermill: {error}") from error


# --- comparing -------------------------------------------------------------------------------------------------------


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What has changed between two documents, in words; the recipe's name may change."""
    found = []
    for key in ("seed", "model"):
        found += _compare(key, old.get(key), new.get(key))
    before, after = ({node["name"]: node for node in d.get("nodes", ())} for d in (old, new))
    found += [f"{name} is gone" for name in before if name not in after]
    found += [f"{name} is new" for name in after if name not in before]
    for name in before:
        if name in after:
            found += _compare(name, before[name], after[name])
    if sorted(map(tuple, old.get("edges", ()))) != sorted(map(tuple, new.get("edges", ()))) and not found:
        found.append("the stages follow each other in another order")
    return found


def _compare(where: str, old: Any, new: Any) -> list[str]:
    if old == new:
        return []
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.keys() == new.keys():
        inner = []
        for key in old:
            inner += _compare(where if key in ("fields", "map") else f"{where}.{key}", old[key], new[key])
        return inner
    return [f"{where}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


__all__ = ["VERSION", "decode", "decode_recipe", "differences", "encode", "encode_recipe", "registry"]

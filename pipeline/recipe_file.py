"""A recipe file: Python that defines ``recipe = mm.Recipe(...)``, imported by path and sent to workers by value.

The module gets a name that depends on the file's own name only, so that a campaign resumed from elsewhere finds its
functions (filters, the user's own stages) under the name that ``recipe.json`` has for them.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from .recipe import Recipe


class RecipeFileError(ValueError):
    """A recipe file is missing, does not run, or defines no recipe; the message names file, line and remedy."""


def load_recipe(path: str | Path) -> Recipe:
    """The ``recipe`` that the Python file at ``path`` defines.

    Raises:
        RecipeFileError: no such file, an error while it runs (with its line), or no `Recipe` named ``recipe``.
    """
    from .recipe import Recipe

    module = load_module(Path(path))
    found = getattr(module, "recipe", None)
    if isinstance(found, Recipe):
        return found
    others = sorted(name for name, value in vars(module).items() if isinstance(value, Recipe))
    if found is not None:
        problem = f"its `recipe` is a {type(found).__name__}, not a mattermill.Recipe"
    elif others:
        problem = f"it defines no `recipe`, but {', '.join(others)}: name the one to run `recipe`"
    else:
        problem = "it defines no `recipe`: add a line `recipe = mattermill.Recipe(...)`"
    raise RecipeFileError(f"{path} is not a recipe file: {problem}")


def structures_of(path: str | Path) -> Any:
    """What the recipe file defines as ``structures``: anything `mattermill.read` takes, or a function that returns it.

    Raises:
        RecipeFileError: it defines none.
    """
    module = sys.modules.get(module_name(Path(path))) or load_module(Path(path))
    found = getattr(module, "structures", None)
    if found is None:
        raise RecipeFileError(f"{path} defines no `structures` of its own: name structure files behind it")
    return found() if callable(found) else found


def load_module(path: Path) -> ModuleType:
    """Run a Python file as a module, registered so that cloudpickle sends what it defines to workers by value."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise RecipeFileError(f"recipe file {path} {what}: give a Python file that defines `recipe`")
    name = module_name(path)
    # A loader is given, so that a name without .py is read as Python too.
    loader = importlib.machinery.SourceFileLoader(name, str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path.resolve(), loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: its dataclasses look their module up
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RecipeFileError(_describe(path, error)) from error
    cloudpickle.register_pickle_by_value(module)
    return module


def module_name(path: Path) -> str:
    """A module name that depends on the file's stem only, and that no installed module has."""
    return "mattermill_recipe_" + re.sub(r"\W", "_", path.stem)


def _describe(path: Path, error: BaseException) -> str:
    """File, line and message of what went wrong while the file ran: the last line of it that was on the stack."""
    where = str(path)
    if isinstance(error, SyntaxError) and error.filename == str(path.resolve()):
        return f"{where}, line {error.lineno}: {error.msg}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.resolve())
    ]
    if lines:
        where += f", line {lines[-1]}"
    if isinstance(error, SystemExit):
        return f"{where}: the file ends Python itself: keep that under `if __name__ == '__main__':`"
    first = (str(error) or "no message").splitlines()[0]
    # A ValueError, ours or another's, says itself what is wrong; of other errors the type is part of the message.
    return f"{where}: {first}" if isinstance(error, ValueError) else f"{where}: {type(error).__name__}: {first}"

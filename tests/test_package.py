"""The package as a user meets it: what an import costs, what it brings along, and that the public names exist."""

from __future__ import annotations

import ast
import importlib
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import mattermill as mm

ROOT = Path(mm.__file__).parent
HEAVY = ("dask", "distributed", "xarray", "netCDF4", "ase", "warp", "vesin", "pandas", "scipy")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_brings_nothing_heavy() -> None:
    assert run(f"import sys, mattermill; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_models_stages_and_batches_need_no_dask() -> None:
    """What runs under torchrun or in a notebook never imports the pipeline's libraries."""
    code = """
import sys, mattermill as mm
mm.models.noble_gases(), mm.Relax(fmax=0.01), mm.Produce(mm.NVE(), steps=10), mm.Batch.empty(), mm.DomainParallel
print([m for m in ("dask", "distributed", "xarray", "netCDF4", "pandas") if m in sys.modules])
"""
    assert run(code) == "[]"


def test_import_costs_little_more_than_torch() -> None:
    """Issue 2, item 1: import mattermill <= 1.2 x import torch, both measured here, in turns, in fresh processes."""
    clock = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
    torch, ours = ([], [])
    for _ in range(3):
        torch.append(float(run(clock.format("torch"))))
        ours.append(float(run(clock.format("mattermill"))))
    assert statistics.median(ours) <= 1.2 * statistics.median(torch)


@pytest.mark.parametrize("name", mm.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(mm, name) is not None
    assert name in dir(mm)


def test_type_checkers_see_the_same_names() -> None:
    """The imports under TYPE_CHECKING, `_HOME` and `__all__` are one list written three times."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        seen.update({alias.name: f".{node.module}" for alias in node.names})
    assert seen.pop("models") == ".domain"
    assert seen == mm._HOME
    assert sorted({*mm._HOME, "models"}) == sorted(mm.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Recipes'"):
        mm.Recipes  # noqa: B018


def test_version_matches_pyproject() -> None:
    tomllib = importlib.import_module("tomllib")
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    assert project["project"]["version"] == mm.__version__


def test_every_subpackage_is_packed() -> None:
    """A folder with an __init__.py that pyproject does not list would be missing from every wheel."""
    tomllib = importlib.import_module("tomllib")
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    found = {"mattermill"}
    for top in ("domain", "stages", "pipeline"):
        for init in (ROOT / top).rglob("__init__.py"):
            found.add("mattermill." + ".".join(init.parent.relative_to(ROOT).parts))
    assert listed == found


def test_imports_go_one_way() -> None:
    """pipeline -> stages -> domain, never back, and only pipeline imports dask, distributed, xarray or netCDF4."""
    above = {"domain": ("stages", "pipeline"), "stages": ("pipeline",), "pipeline": ()}
    only_pipeline = ("dask", "distributed", "xarray", "netCDF4")
    wrong = []
    for layer, forbidden in above.items():
        for file in (ROOT / layer).rglob("*.py"):
            for module in imported_modules(file):
                top = module.removeprefix("mattermill.").split(".")[0]
                if top in forbidden or (layer != "pipeline" and top in only_pipeline):
                    wrong.append(f"{file.relative_to(ROOT)} imports {module}")
    assert wrong == []


def imported_modules(file: Path) -> list[str]:
    """Absolute names of what a file of the package imports, relative imports resolved against its place."""
    package = ["mattermill", *file.parent.relative_to(ROOT).parts]
    modules = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            modules.append(".".join([*base, node.module or ""]).rstrip("."))
    return modules

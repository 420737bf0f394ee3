"""The command line: what goes well, and that bad input is one line that says what to do, with exit status 2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ase.build import bulk
from ase.io import read, write
from typer.testing import CliRunner

import mattermill as mm
from mattermill.pipeline.cli import app
from mattermill.pipeline.recipe_file import module_name

ROOT = Path(mm.__file__).parent

RECIPE = """
import mattermill as mm

class Hold(mm.Produce):
    '''A stage of the file's own: it must reach the workers by value.'''

def is_bound(results):
    return results["energy_per_atom"] < 0

model = mm.models.noble_gases(cutoff=7.0)
relax = mm.Relax(fmax=0.01, cell="isotropic", max_steps=200)
bound = mm.Filter(is_bound, name="bound")
hold = Hold(mm.NVT(30.0), steps={steps}, every=10, dt=2.0, name="hold", ranks={ranks})
recipe = mm.Recipe("small", model=model, graph=relax >> bound >> hold)
"""


def invoke(*arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command, in this process."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: object) -> str:
    """The one line of a command that must be refused."""
    code, _, err = invoke(*arguments)
    assert code == 2, err
    assert err.startswith("mattermill: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


@pytest.fixture
def recipe_file(tmp_path: Path) -> Callable[[str], Path]:
    def write_text(text: str) -> Path:
        path = tmp_path / "a recipe.py"
        path.write_text(text)
        return path

    return write_text


def crystals(folder: Path, *sizes: int) -> list[Path]:
    paths = []
    for size in sizes:
        crystal = bulk("Ar", "fcc", a=5.4, cubic=True) * (size, size, size)
        paths.append(folder / f"argon-{len(crystal)}.extxyz")
        write(paths[-1], crystal)
    return paths


# --- a campaign from the shell ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A finished campaign, run as a user does: another process, another folder, one file that is not there."""
    folder = tmp_path_factory.mktemp("shell")
    (folder / "small.py").write_text(RECIPE.format(steps=40, ranks=2))
    crystals(folder, 3, 4)
    command = [sys.executable, "-m", "mattermill.pipeline.cli", "run", "small.py", "argon-*.extxyz", "gone.xyz"]
    command += ["--out", "small.mill", "--ranks", "2", "--seed", "7"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    return folder / "small.mill", ended


def test_run_ends_well_and_names_what_failed(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, ended = done
    assert ended.returncode == 0, ended.stderr
    assert "3 systems, 1 of them not read" in ended.stdout
    assert "gone: failed in relax: could not be read" in ended.stdout
    assert 'mattermill.open_campaign("' in ended.stdout
    assert "\x1b[" not in ended.stdout + ended.stderr  # no bars, no colours: not a terminal
    summary = mm.open_campaign(folder).summary
    assert sorted(summary["hold"]["system"].values) == ["argon-108", "argon-256"]
    assert set(summary["hold"]["status"].values) == {"finished"}
    assert json.loads((folder / "recipe.json").read_text())["seed"] == 7


def test_status_of_a_finished_campaign(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    code, out, _ = invoke("status", done[0])
    assert code == 0
    lines = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
    assert list(lines) == ["relax", "bound", "hold"]
    assert [int(n) for n in lines["relax"].replace("│", " ").split()[1:]] == [2, 1, 3]
    assert "no process works on it" in out


def test_show_a_campaign_whose_recipe_has_code_of_its_own(
    done: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    code, out, _ = invoke("show", done[0])
    assert code == 0
    assert [name for name in ("relax", "bound", "hold") if name in out] == ["relax", "bound", "hold"]
    assert "show RECIPE.py" in out


def test_export_writes_the_last_states(done: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    code, out, _ = invoke("export", done[0], "--out", tmp_path / "final.extxyz")
    assert code == 0
    assert "2 structures" in out
    final = read(tmp_path / "final.extxyz", index=":")
    assert sorted(len(atoms) for atoms in final) == [108, 256]


def test_a_folder_with_a_campaign_is_refused(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    before = (done[0] / "ledger.sqlite").read_bytes()
    err = refused("run", done[0].parent / "small.py", done[0].parent / "argon-108.extxyz", "--out", done[0])
    assert "already holds a campaign" in err
    assert "mattermill resume" in err
    assert (done[0] / "ledger.sqlite").read_bytes() == before


def test_resume_needs_the_file_where_the_recipe_has_code(
    done: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    assert "--recipe" in refused("resume", done[0])
    # Nothing is left to do, so it ends at once. The seed is still that of the run's command line.
    code, out, err = invoke("resume", done[0], "--recipe", done[0].parent / "small.py", "--quiet")
    assert code == 0, err
    assert "3 systems" in out
    assert json.loads((done[0] / "recipe.json").read_text())["seed"] == 7


@pytest.mark.slow
def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    """SIGINT and SIGTERM end a run in good order with status 130; `resume` brings it to its end."""
    (tmp_path / "small.py").write_text(RECIPE.format(steps=40_000, ranks=1))
    crystals(tmp_path, 4)
    base = [sys.executable, "-m", "mattermill.pipeline.cli"]
    command = [*base, "run", "small.py", "argon-256.extxyz", "--out", "x.mill", "--ranks", "1"]
    for number, how in enumerate((signal.SIGINT, signal.SIGTERM)):
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and not running(tmp_path / "x.mill"):
            time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(how)
        _, err = process.communicate(timeout=90)
        assert process.returncode == 130, err
        assert "mattermill resume" in err
        command = [*base, "resume", "x.mill", "--recipe", "small.py", "--ranks", "1"]
        assert number < 2
    code, out, _ = invoke("status", tmp_path / "x.mill")
    assert code == 0
    assert "pending" in out


def running(folder: Path) -> bool:
    """Whether a system is in its last stage."""
    if not (folder / "ledger.sqlite").exists():
        return False
    return mm.open_campaign(folder).status().get("hold", {}).get("running", 0) > 0


# --- recipes ---------------------------------------------------------------------------------------------------


def test_show_prints_the_graph() -> None:
    code, out, _ = invoke("show", ROOT / "recipes" / "noble_gases.py")
    assert code == 0
    places = [out.index(name) for name in ("relax  ", "heat  ", "equilibrate  ", "small  ", "produce  ", "large  ")]
    assert places == sorted(places)
    assert "n_atoms <= 2000" in out
    assert "ranks=2" in out


def test_unknown_recipe_file(tmp_path: Path) -> None:
    assert "does not exist" in refused("run", tmp_path / "none.py", "x.cif")
    assert "is a folder" in refused("run", tmp_path, "x.cif")


def test_file_without_a_recipe(recipe_file: Callable[[str], Path]) -> None:
    assert "add a line" in refused("show", recipe_file("x = 1\n"))
    assert "is a int, not a mattermill.Recipe" in refused("show", recipe_file("recipe = 3\n"))
    named = "import mattermill as mm\nmine = mm.Recipe('r', model=mm.models.noble_gases(), graph=mm.Relax())\n"
    assert "but mine: name the one to run `recipe`" in refused("show", recipe_file(named))


def test_an_error_in_a_recipe_file_is_named_with_its_line(recipe_file: Callable[[str], Path]) -> None:
    err = refused("show", recipe_file("x = 1\n\ndef f():\n    return x / 0\n\nf()\n"))
    assert "a recipe.py, line 4: ZeroDivisionError: division by zero" in err
    err = refused("show", recipe_file("x = (1\n"))
    assert "line 1: '(' was never closed" in err
    assert "line 1: ModuleNotFoundError" in refused("show", recipe_file("import no_such_module\n"))
    assert "__main__" in refused("show", recipe_file("import sys\nsys.exit(3)\n"))
    assert "line 2: fmax must be" in refused("show", recipe_file("import mattermill as mm\nmm.Relax(fmax=-1)\n"))


def test_a_cycle_and_a_name_used_twice(recipe_file: Callable[[str], Path]) -> None:
    start = "import mattermill as mm\na, b = mm.Relax(name='a'), mm.Heat(1, 2, name='b')\n"
    end = "recipe = mm.Recipe('r', model=mm.models.noble_gases(), graph={})\n"
    err = refused("run", recipe_file(start + end.format("a >> b >> a")), "x.cif")
    assert "line 3: a >> b >> a is a cycle" in err
    err = refused("run", recipe_file(start + end.format("a >> mm.Heat(5, 6, name='a')")), "x.cif")
    assert "'a' is used twice" in err


def test_a_recipe_file_is_pickled_by_value(recipe_file: Callable[[str], Path]) -> None:
    """What the file defines reaches a process that has never seen it."""
    import cloudpickle

    from mattermill.pipeline.recipe_file import load_recipe

    path = recipe_file(RECIPE.format(steps=10, ranks=1))
    data = cloudpickle.dumps(load_recipe(path))
    code = "import sys, pickle; r = pickle.loads(sys.stdin.buffer.read()); print(r.plan.nodes['hold'].steps)"
    ended = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True, timeout=120)
    assert ended.stdout.split() == [b"10"]
    assert module_name(path) in sys.modules


# --- other bad input -------------------------------------------------------------------------------------------


def test_no_structures(recipe_file: Callable[[str], Path], tmp_path: Path) -> None:
    path = recipe_file(RECIPE.format(steps=10, ranks=1))
    assert "defines no `structures`" in refused("run", path, "--out", tmp_path / "x.mill")
    assert "no file matches" in refused("run", path, tmp_path / "*.cif", "--out", tmp_path / "x.mill")
    assert not (tmp_path / "x.mill").exists()


def test_a_folder_of_something_else_is_refused(recipe_file: Callable[[str], Path], tmp_path: Path) -> None:
    path = recipe_file(RECIPE.format(steps=10, ranks=1))
    assert "something else" in refused("run", path, "x.cif", "--out", tmp_path)


def test_more_ranks_than_there_are(recipe_file: Callable[[str], Path], tmp_path: Path, cluster: object) -> None:
    out = tmp_path / "x.mill"
    [structure] = crystals(tmp_path, 3)
    address = cluster.scheduler_address  # type: ignore[attr-defined]
    greedy = recipe_file(RECIPE.format(steps=10, ranks=3))
    assert "asks for 3 ranks, there are 2" in refused("run", greedy, structure, "--out", out, "--scheduler", address)
    assert "asks for 3 ranks, there are 2" in refused("run", greedy, structure, "--out", out, "--ranks", 2)
    modest = recipe_file(RECIPE.format(steps=10, ranks=1))
    err = refused("run", modest, structure, "--out", out, "--scheduler", address, "--ranks", 3)
    assert "3 ranks asked, the cluster has 2" in err
    assert not out.exists()


def test_no_scheduler(recipe_file: Callable[[str], Path], tmp_path: Path) -> None:
    path = recipe_file(RECIPE.format(steps=10, ranks=1))
    [structure] = crystals(tmp_path, 3)
    err = refused("run", path, structure, "--out", tmp_path / "x.mill", "--scheduler", "tcp://127.0.0.1:9")
    assert "no Dask scheduler answers at tcp://127.0.0.1:9" in err


@pytest.mark.parametrize("command", ["status", "resume", "export"])
def test_no_campaign(command: str, tmp_path: Path) -> None:
    more = ["--out", tmp_path / "x.extxyz"] if command == "export" else []
    assert "holds no campaign" in refused(command, tmp_path, *more)
    assert "is not a folder" in refused(command, tmp_path / "none.mill", *more)


def test_an_error_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mattermill.pipeline import recipe_file as module

    def broken(path: Path) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(module, "load_recipe", broken)
    with pytest.raises(AssertionError, match="a bug"):
        invoke("show", tmp_path / "x.py")


def test_help_names_the_units() -> None:
    code, out, _ = invoke("--help")
    assert code == 0
    for word in ("run", "resume", "status", "show", "export", "doctor", "GPa"):
        assert word in out
    assert "OMP_NUM_THREADS" in os.environ

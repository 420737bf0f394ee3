"""The command line: `mattermill run`, `resume`, `status`, `show`, `export`, `doctor`.

Exit status, the same for all commands:

| status | meaning |
|---|---|
| 0 | done; of a campaign: every system went as far as it could (some may have failed: the last lines say which) |
| 1 | a campaign ended before its end: too much failed, or the ranks were lost; of `doctor`: something is in the way |
| 2 | what was asked cannot be done; one line says what to do |
| 130 | interrupted; `mattermill resume` goes on |
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from .ledger import Ledger

app = typer.Typer(
    name="mattermill",
    help="Recipes of simulation stages over thousands of structures. Units: Å, eV, amu, fs, K, GPa, e.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE.py", help="Python file that defines `recipe`.")]
CampaignFolder = Annotated[Path, typer.Argument(metavar="CAMPAIGN.mill", help="Folder of a campaign.")]
Ranks = Annotated[int | None, typer.Option(min=1, help="Ranks of a local run; all cores by default.")]
Scheduler = Annotated[str | None, typer.Option(metavar="ADDRESS", help="Use the Dask cluster of this scheduler.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the closing lines.")]


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """What a user did becomes one line on standard error and exit status 2; MATTERMILL_TRACEBACK=1 shows it all.

    Only errors that name themselves as the user's (`ValueError` and our own types) and those of files count: a bug of
    ours keeps its traceback.
    """
    from .errors import CampaignError
    from .ledger import LedgerError

    try:
        yield
    except (ValueError, CampaignError, LedgerError, OSError, NotImplementedError) as error:
        if os.environ.get("MATTERMILL_TRACEBACK"):
            raise
        fail(str(error) or type(error).__name__)


def fail(message: str, status: int = EXIT_USAGE) -> None:
    """One line on standard error, and the end."""
    line = " ".join(message.split())
    print(f"mattermill: {line}", file=sys.stderr)
    raise typer.Exit(status)


def console() -> Console:
    """Standard output; a file or a pipe gets lines as wide as they need."""
    return Console() if sys.stdout.isatty() else Console(width=160, highlight=False)


@app.command()
def run(
    recipe_file: RecipeFile,
    structures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STRUCTURES",
            help="Files that ASE reads; globs are fine. Without any, the `structures` that the recipe file defines.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; by default RECIPE.mill here.")] = None,
    ranks: Ranks = None,
    scheduler: Scheduler = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of all noise and velocities, in place of the recipe's.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run a recipe over structures; it blocks until the campaign has ended."""
    from ..domain.reading import read
    from .folder import Folder, safe_name
    from .recipe_file import load_recipe, structures_of

    with one_line_errors():
        recipe = load_recipe(recipe_file)
        if seed is not None:
            recipe = dataclasses.replace(recipe, seed=seed)
        folder = Folder(out or f"{safe_name(recipe.name)}.mill")
        folder.refuse_campaign()  # before any file is read or any worker starts
        systems = read(structures if structures else structures_of(recipe_file))
        with _client(scheduler) as client:
            campaign = recipe.start(
                systems, out=folder.path, client=client, ranks=ranks, progress=False if quiet else None
            )
            _wait(campaign, folder.path)


@app.command()
def resume(
    folder: CampaignFolder,
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="RECIPE.py", help="The recipe file again; needed where it has functions of its own."),
    ] = None,
    ranks: Ranks = None,
    scheduler: Scheduler = None,
    force_lock: Annotated[
        bool,
        typer.Option(
            "--force-lock",
            help="Take the folder from whoever holds it; only when that process, on another host or in another "
            "container, is surely gone.",
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a campaign that was stopped or killed."""
    from .campaign import start_again
    from .recipe_file import load_recipe

    with one_line_errors():
        known = load_recipe(recipe) if recipe is not None else None
        if known is not None:
            known = dataclasses.replace(known, seed=_stored_seed(folder, known.seed))
        with _client(scheduler) as client:
            campaign = start_again(
                folder, known, client=client, ranks=ranks, progress=False if quiet else None, force=force_lock
            )
            _wait(campaign, folder)


@app.command()
def status(folder: CampaignFolder) -> None:
    """Where the systems of a campaign are; also while it runs."""
    from .folder import Folder
    from .lock import read_holder

    with one_line_errors():
        place = Folder.open(folder)
        with _ledger(place.path) as ledger:
            out = console()
            out.print(_table(place, ledger))
            _print_failures(out, ledger)
        holder = read_holder(place.lock)
    if holder is not None and holder.is_gone() is not True:
        out.print(f"held by {holder}", markup=False)
    else:
        out.print("no process works on it")


@app.command()
def show(
    what: Annotated[Path, typer.Argument(metavar="RECIPE.py|CAMPAIGN.mill", help="A recipe file, or a campaign.")],
) -> None:
    """The graph of a recipe, as text."""
    from .recipe_file import load_recipe
    from .views import recipe_tree

    with one_line_errors():
        console().print(_stored_tree(what) if what.is_dir() else recipe_tree(load_recipe(what)))


@app.command()
def export(
    folder: CampaignFolder,
    out: Annotated[Path, typer.Option(help="File to write; its ending names the format (extxyz, cif, ...).")],
    stage: Annotated[
        str | None, typer.Option(help="States at the end of this stage; by default each one's last.")
    ] = None,
) -> None:
    """Write the final structures of a campaign to one file that ASE and others read."""
    from .export import write_final_structures

    with one_line_errors():
        number = write_final_structures(folder, out, stage)
        console().print(f"{number} structures in {out}", markup=False)


@app.command()
def doctor(
    folder: Annotated[Path, typer.Argument(help="Where a campaign would be written.")] = Path(),
    scheduler: Scheduler = None,
) -> None:
    """Can this machine, this folder and this cluster run a campaign?"""
    from .doctor import Verdict, examine

    marks = {Verdict.OK: "[green]ok[/]  ", Verdict.NOTE: "[yellow]note[/]", Verdict.BAD: "[red]BAD[/] "}
    out = console()
    bad = 0
    for check in examine(folder, scheduler):
        bad += check.verdict is Verdict.BAD
        out.print(f"{marks[check.verdict]} [bold]{check.name}[/]: {escape(check.detail)}", soft_wrap=True)
    if bad:
        fail(f"{bad} check{'s' if bad > 1 else ''} failed", EXIT_FAILED)


@contextlib.contextmanager
def _client(scheduler: str | None) -> Iterator[Any]:
    """A client of the scheduler at this address; None without an address: the campaign starts its own cluster."""
    if scheduler is None:
        yield None
        return
    from distributed import Client

    from .errors import CampaignError

    try:
        client = Client(scheduler, timeout=10)
    except (OSError, TimeoutError) as error:
        raise CampaignError(f"no Dask scheduler answers at {scheduler}: check the address, or leave it out") from error
    with client:
        yield client


def _wait(campaign: Any, folder: Path) -> None:
    """Wait for the end of a campaign, then say how it went."""
    from .errors import CampaignError
    from .folder import Folder

    try:
        with _interrupted_by_sigterm():
            campaign.see_through()
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except CampaignError as error:
        fail(f"{error} (go on with `mattermill resume {folder}`)", EXIT_FAILED)
    out = console()
    with _ledger(folder) as ledger:
        left = len(ledger.pending())
        out.print(_table(Folder(folder), ledger))
        _print_failures(out, ledger)
    if left:
        fail(f"stopped with {left} visits to go: go on with `mattermill resume {folder}`", EXIT_FAILED)
    out.print(
        f'results in {folder}: mattermill.open_campaign("{folder}")', markup=False, highlight=False, soft_wrap=True
    )


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """A batch system ends jobs with SIGTERM: inside, that is an interrupt like any other."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stored_seed(folder: Path, default: int) -> int:
    """The seed that the campaign was started with: `run --seed` may have changed that of the recipe file."""
    from .folder import Folder

    seed = json.loads(Folder.open(folder).recipe.read_text()).get("seed")
    return seed if isinstance(seed, int) else default


def _ledger(folder: Path) -> Ledger:
    from .folder import Folder
    from .ledger import Ledger

    return Ledger.open_readonly(Folder.open(folder).ledger)


def _table(place: Any, ledger: Ledger) -> Any:
    from .views import running_steps, status_table

    order = _order(place.recipe)
    systems = ledger.systems()
    unread = sum(1 for s in systems if s.failure)
    title = f"{escape(place.path.name)}: {len(systems)} systems" + (f", {unread} of them not read" if unread else "")
    return status_table(title, order, ledger.counts(), running_steps(ledger))


def _print_failures(out: Console, ledger: Ledger) -> None:
    from .views import failure_lines

    for line in failure_lines(ledger):
        out.print(line, style="red", markup=False, soft_wrap=True)


def _order(path: Path) -> list[str]:
    """The names of the nodes in the order of the graph, as recipe.json has them; none where it cannot be read."""
    from .views import node_names

    try:
        return node_names(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # the ledger's own order serves


def _stored_tree(folder: Path) -> Any:
    """The tree of a campaign's recipe.json."""
    from .errors import RecipeError
    from .folder import Folder
    from .recipe import Recipe
    from .views import document_tree, recipe_tree

    path = Folder.open(folder).recipe
    document = json.loads(path.read_text())
    try:
        return recipe_tree(Recipe.from_json(document))
    except RecipeError:
        return document_tree(document)


def main() -> None:
    """Entry point of the console script."""
    # Before torch is imported: a rank computes on one core, and the workers inherit this.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    app()


if __name__ == "__main__":
    main()

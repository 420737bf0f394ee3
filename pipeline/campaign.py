"""The campaign as its user holds it: a handle on a thread of its own, and a view of what is found."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .atomic import remove_leftovers
from .cluster import Address, check_members, default_ranks, members, own_cluster, wait_for_members
from .errors import CampaignError
from .events import CampaignEnded, Event
from .folder import Folder
from .intake import begin, go_on, structures_of, sweep
from .options import Options
from .progress import Listener, listener
from .view import CampaignView

if TYPE_CHECKING:
    from distributed import Client

    from .ledger import Ledger
    from .lock import Lock
    from .program import Program
    from .recipe import Recipe

logger = logging.getLogger(__name__)

Progress = bool | Callable[[Event], None] | None


class Campaign(CampaignView):
    """A campaign that runs or has run. Everything of `CampaignView` works at any time.

    It lives in a thread with an event loop of its own, so it works in a script, in a notebook and beside a running
    event loop, where ``await campaign`` waits for its end. When the process ends before it does, it can be resumed.
    """

    def __init__(self, recipe: Recipe, folder: Folder, ledger: Ledger, lock: Lock, options: Options) -> None:
        super().__init__(folder)
        self.recipe, self.options = recipe, options
        self._writer, self._lock = ledger, lock
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._stop_asked = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[Any] | None = None
        self._program: Program | None = None
        self._listener: Listener = listener(False)

    # --- starting ------------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        recipe: Recipe,
        structures: Any,
        out: str | os.PathLike[str],
        *,
        client: Client | None = None,
        ranks: int | None = None,
        progress: Progress = False,
        **options: Any,
    ) -> Campaign:
        """See `Recipe.start`."""
        chosen = Options.of(options)
        Folder(out).refuse_campaign()
        place = _place(recipe, client, ranks, chosen.worker_seconds)
        systems = structures_of(structures)
        folder = Folder.create(out)
        lock = folder.hold(new=True)
        try:
            ledger = begin(folder, recipe, systems)
            ledger.set_meta("options", {k: v for k, v in asdict(chosen).items() if k != "limits"})
        except BaseException:
            lock.release()
            raise
        return cls(recipe, folder, ledger, lock, chosen)._launch(place, progress)

    @classmethod
    def again(
        cls,
        path: str | os.PathLike[str],
        recipe: Recipe | None = None,
        *,
        client: Client | None = None,
        ranks: int | None = None,
        progress: Progress = False,
        force: bool = False,
        **options: Any,
    ) -> Campaign:
        """See `start_again`."""
        folder = Folder.open(path)
        lock = folder.hold(force=force)
        try:
            recipe, ledger = go_on(folder, recipe)
            try:
                chosen = Options.of({**(ledger.meta("options") or {}), **options})
                place = _place(recipe, client, ranks, chosen.worker_seconds)
                sweep(folder, ledger)
            except BaseException:
                ledger.close()
                raise
            remove_leftovers(folder.path)
        except BaseException:
            lock.release()
            raise
        return cls(recipe, folder, ledger, lock, chosen)._launch(place, progress)

    def _launch(self, place: tuple[Address | None, int | None], progress: Progress) -> Campaign:
        # Not waited for at the interpreter's end: by then no thread can be started, so nothing could be drained.
        thread = threading.Thread(
            target=self._live, args=place, name=f"mattermill {self.folder.path.name}", daemon=True
        )
        try:
            self._listener = listener(progress)
            thread.start()
        except BaseException:
            self._close()
            raise
        return self

    # --- the thread ----------------------------------------------------------------------------------------

    def _live(self, address: Address | None, ranks: int | None) -> None:
        try:
            asyncio.run(self._run(address, ranks))
        except asyncio.CancelledError:
            logger.info("%s was stopped at once", self.folder.path)
        except BaseException as error:  # told to whoever waits
            self._error = error
        finally:
            self._close()

    async def _run(self, address: Address | None, ranks: int | None) -> None:
        from .program import Program

        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        program = Program(
            self.recipe, self.folder, self._writer, self._lock, self.options, self._tell, own=address is None
        )
        self._program = program
        if self._stop_asked:
            program.stop()
        if not self._writer.pending():
            await program.conclude()
        elif address is not None:
            await program.run(address, ranks)
        else:
            async with own_cluster(ranks or default_ranks()) as cluster:
                await program.run(Address(cluster.scheduler_address, cluster.security), None, cluster.dashboard_link)

    def _tell(self, event: Event) -> None:
        try:
            self._listener(event)
        except Exception:  # somebody else's display must not end a campaign; it is told in the log
            logger.exception("the progress listener failed on %s", type(event).__name__)

    def _close(self) -> None:
        """Each step by itself: a terminal or a folder that has gone must not keep whoever waits from the end."""
        try:
            for step in (self._farewell, self._listener.close, self._writer.close, self._lock.release):
                try:
                    step()
                except Exception as error:  # told to whoever waits, unless there was one before
                    logger.exception("%s: an error at the end", self.folder.path)
                    self._error = self._error or error
        finally:
            self._ended.set()

    def _farewell(self) -> None:
        try:
            left = bool(self._writer.pending())
        except CampaignError as error:
            self._error = self._error or error
            left = True
        outcome = "failed" if self._error is not None else "stopped" if left else "finished"
        self._tell(CampaignEnded(outcome, str(self._error or "")))

    # --- for the user ----------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Campaign:
        """Wait for the end, and say what went wrong.

        Raises:
            CampaignError: it could not go on; what it did can be resumed.
            TimeoutError: it still runs after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended.wait(0.2):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the campaign in {self.folder.path} still runs after {timeout:g} s")
        if self._error is not None:
            raise self._error
        return self

    def __await__(self) -> Generator[Any, None, Campaign]:
        return asyncio.to_thread(self.wait).__await__()

    def stop(self, wait: bool = True) -> None:
        """End in good order: gangs finish their segment, write checkpoints and leave. `start_again` goes on.

        Args:
            wait: until that is done. A second interrupt meanwhile stops at once, which loses what was done since the
                last checkpoints and nothing else.
        """
        self._stop_asked = True
        if self._program is not None:
            self._call(self._program.stop)
        if not wait:
            return
        try:
            self._ended.wait()
        except KeyboardInterrupt:
            self.abort()

    def abort(self) -> None:
        """End at once. What was done since the last checkpoints is done again by whoever resumes."""
        if self._main is not None:
            self._call(self._main.cancel)
        self._ended.wait(30)

    def _call(self, function: Callable[[], Any]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            logger.debug("the campaign's loop has closed already")

    def see_through(self) -> Campaign:
        """Wait for the end; at Ctrl-C stop in good order and say how to go on."""
        try:
            return self.wait()
        except KeyboardInterrupt:
            print("\nstopping: checkpoints are being written (Ctrl-C again stops at once)", file=sys.stderr)
            self.stop()
            print(f"interrupted: go on with `mattermill resume {self.folder.path}`", file=sys.stderr)
            raise

    def __repr__(self) -> str:
        return super().__repr__().replace("CampaignView", "Campaign", 1)


def start_again(
    path: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    client: Client | None = None,
    ranks: int | None = None,
    progress: Progress = False,
    force: bool = False,
    **options: Any,
) -> Campaign:
    """Go on with a campaign that was stopped or killed, and return at once.

    Args:
        path: its folder.
        recipe: needed only where it has functions or stages of the user's own; it must be what it was.
        client, ranks, progress, options: as in `Recipe.run`; options are by default what they were.
        force: take the folder from whoever holds it. Only right when that process is gone and cannot be seen from
            here: it ran on another host, or in another container. One that lives loses what it has not recorded.

    Raises:
        FolderError: there is no campaign.
        LockedError: it still runs, says where.
        CampaignError: the recipe has changed, says in what.
        RecipeError: the recipe must be handed over again.
    """
    return Campaign.again(path, recipe, client=client, ranks=ranks, progress=progress, force=force, **options)


def resume(
    path: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    client: Client | None = None,
    ranks: int | None = None,
    progress: Progress = None,
    force: bool = False,
    **options: Any,
) -> Campaign:
    """Go on with a campaign that was stopped or killed, to its end; see `start_again` and `Recipe.run`."""
    refuse_to_block(client, "mattermill.pipeline.campaign.start_again(...)")
    again = start_again(path, recipe, client=client, ranks=ranks, progress=progress, force=force, **options)
    return again.see_through()


def refuse_to_block(client: Client | None, instead: str) -> None:
    """Waiting inside the event loop that an asynchronous client lives in would wait for ever.

    Raises:
        CampaignError: that is what would happen; says what to call instead.
    """
    if client is None or not client.asynchronous:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise CampaignError(f"this call would block the event loop that its client needs: use `await {instead}`")


def _place(
    recipe: Recipe, client: Client | None, ranks: int | None, seconds: float
) -> tuple[Address | None, int | None]:
    """Where it will run, checked. A cluster that still fills is waited for at most so many seconds."""
    from .plan import ranks_of

    if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
        raise CampaignError(f"ranks must be a whole number from 1, is {ranks!r}")
    needed = max(ranks_of(stage) for stage in recipe.plan.stages.values())
    if client is None:
        here = ranks or default_ranks()
        if needed > here:
            raise CampaignError(
                f"a stage of the recipe asks for {needed} ranks, there are {here}: give ranks={needed} to the campaign "
                "(more than one a core is slow), or fewer to the stage"
            )
        return None, here
    address = Address.of(client)
    if client.asynchronous or client.scheduler is None:
        return address, ranks
    # Of none yet, the campaign waits for the first ones, while its user has it in hand already.
    if members(client.sync(client.scheduler.identity)):
        found = client.sync(wait_for_members, client.scheduler.identity, max(needed, ranks or 1), seconds)
        check_members(found, needed, ranks)
    return address, ranks


__all__ = ["Campaign", "resume", "start_again"]

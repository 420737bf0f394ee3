"""Progress: bars per stage on a terminal, seldom lines elsewhere, from the campaign's events."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol

from .events import (
    CampaignEnded,
    CampaignStarted,
    Event,
    GangEnded,
    SegmentEnded,
    StageEnded,
    VisitEnded,
    VisitQueued,
)
from .scheduling import estimate

#: Seconds over which the rate is averaged, and between two lines where there is no terminal.
WINDOW, LINE_EVERY = 30.0, 30.0


class Listener(Protocol):
    """Whoever is told. Called on the campaign's thread."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


def listener(progress: bool | Callable[[Event], None] | None) -> Listener:
    """None or True: bars if standard error is a terminal, else lines; False: nothing; a function: that function."""
    if callable(progress):
        return _Function(progress)
    if progress is False:
        return _Function(lambda event: None)
    return Bars() if sys.stderr.isatty() else Lines()


class _Function:
    def __init__(self, function: Callable[[Event], None]) -> None:
        self._function = function

    def __call__(self, event: Event) -> None:
        self._function(event)

    def close(self) -> None:
        pass


class Tally:
    """What is known of each stage: visits queued and ended, rate, estimate."""

    def __init__(self) -> None:
        self.name = ""
        self.stages: tuple[str, ...] = ()
        self.queued: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.began: dict[str, float] = {}
        self.over: set[str] = set()
        self._work: dict[str, deque[tuple[float, int, float]]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, CampaignStarted):
            self.name, self.stages = event.name, event.stages
            self.queued.update(event.waiting)
        elif isinstance(event, VisitQueued):
            self.queued[event.stage] += 1
        elif isinstance(event, VisitEnded) and event.stage in self.stages:
            self.ended[event.stage] += 1
            self.failed[event.stage] += event.status in ("failed", "quarantined")
        elif isinstance(event, SegmentEnded):
            now = time.monotonic()
            self.began.setdefault(event.stage, now - event.seconds)
            self._work.setdefault(event.stage, deque()).append((now, event.atom_steps, event.seconds))
        elif isinstance(event, StageEnded):
            self.over.add(event.stage)

    def rate(self, stage: str) -> float:
        """Atom-steps per second of all gangs of a stage, over the last half minute."""
        now, work = time.monotonic(), self._work.get(stage, deque())
        while work and now - work[0][0] > WINDOW:
            work.popleft()
        if not work:
            return 0.0
        span = now - min(at - seconds for at, _, seconds in work)
        return sum(steps for _, steps, _ in work) / max(span, 1e-3)

    def left(self, stage: str) -> float:
        """Seconds until what is queued has ended; NaN where that cannot be said."""
        passed = time.monotonic() - self.began.get(stage, time.monotonic())
        return estimate(self.ended[stage], self.queued[stage], passed)

    def line(self, stage: str) -> str:
        rate, left = self.rate(stage), self.left(stage)
        parts = [f"{stage} {self.ended[stage]}/{self.queued[stage]}"]
        if self.failed[stage]:
            parts.append(f"{self.failed[stage]} failed")
        if rate and stage not in self.over:
            parts.append(f"{_short(rate)} atom-steps/s")
        if left == left and left > 0 and stage not in self.over:
            parts.append(f"{_clock(left)} left")
        return ", ".join(parts)


class Lines:
    """A line about all stages now and then, and one at the end."""

    def __init__(self, write: Callable[[str], Any] | None = None) -> None:
        self.tally = Tally()
        self._write = write or (lambda text: print(text, file=sys.stderr, flush=True))
        self._last = time.monotonic()

    def __call__(self, event: Event) -> None:
        self.tally(event)
        if isinstance(event, CampaignStarted):
            dashboard = f", dashboard {event.dashboard}" if event.dashboard else ""
            self._write(f"{event.name}: {sum(event.waiting.values())} visits wait, {event.ranks} ranks{dashboard}")
        elif isinstance(event, GangEnded) and event.lost:
            self._write(f"{event.stage}: lost {', '.join(event.lost)}; its systems restart")
        elif isinstance(event, CampaignEnded):
            self._write(f"{self.tally.name or 'campaign'} {event.outcome}{': ' if event.reason else ''}{event.reason}")
        elif time.monotonic() - self._last > LINE_EVERY:
            self._last = time.monotonic()
            busy = [s for s in self.tally.stages if self.tally.queued[s] and s not in self.tally.over]
            self._write("; ".join(map(self.tally.line, busy)))

    def close(self) -> None:
        pass


class Bars:
    """A bar per stage, on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.tally = Tally()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self._bars: dict[str, Any] = {}
        self._started = False
        self._drawn = 0.0

    def __call__(self, event: Event) -> None:
        self.tally(event)
        if isinstance(event, CampaignStarted):
            if event.dashboard:
                self._progress.console.print(f"dashboard: {event.dashboard}", highlight=False)
            for stage in event.stages:
                self._bars[stage] = self._progress.add_task(stage, total=0, detail="", start=False)
            self._progress.start()
            self._started = True
        elif isinstance(event, GangEnded) and event.lost:
            self._progress.console.print(
                f"{event.stage}: lost {', '.join(event.lost)}; its systems restart", style="yellow", markup=False
            )
        rare = isinstance(event, CampaignStarted | StageEnded | CampaignEnded)
        if rare or time.monotonic() - self._drawn > 0.2:
            self._drawn = time.monotonic()
            self._update()

    def _update(self) -> None:
        for stage, bar in self._bars.items():
            tally = self.tally
            if stage in tally.began:
                self._progress.start_task(bar)
            detail = tally.line(stage).partition(", ")[2]
            self._progress.update(bar, total=tally.queued[stage], completed=tally.ended[stage], detail=detail)
            if stage in tally.over:
                self._progress.stop_task(bar)

    def close(self) -> None:
        if self._started:
            self._progress.stop()


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g} "


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


__all__ = ["Bars", "Lines", "Listener", "Tally", "listener"]

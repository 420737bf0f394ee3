"""Streams of tickets: what flows between stages through the campaign. A ticket names a system; the data stay away.

A stream is bounded in what it should hold, not in what it takes: a finished system is never refused (it is in the
ledger already), but a stream that is full asks its producers to take no more in, see `Stream.is_full`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Parcel:
    """Where the state of several finished systems lies: a durable file, and for a while a future on their lead.

    `future` is a Dask future of the batch; it is dropped with the last ticket, and worthless once `holder` is gone.
    """

    file: str
    digest: str | None
    holder: str | None = None
    future: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Ticket:
    """A system that waits for a stage.

    Args:
        system: its id.
        n_atoms: its size, by which work is shared out.
        parcel: the state it starts from: the stage's input, or its last checkpoint.
        fallbacks: older states, used when the newer turns out to be damaged; newest first.
        deaths: how many gangs have died with it aboard in this stage.
        fault: the error with which its last gang ended, if it was an error and not a death.
    """

    system: str
    n_atoms: int
    parcel: Parcel
    fallbacks: tuple[Parcel, ...] = ()
    deaths: int = 0
    fault: str = ""

    def died(self) -> Ticket:
        return replace(self, deaths=self.deaths + 1)

    @property
    def is_alone(self) -> bool:
        """Whether it has cost so much that it is tried without company."""
        return self.deaths >= MAX_DEATHS or bool(self.fault)


#: Gangs that a system may take down before it is tried alone.
MAX_DEATHS = 3


class Stream:
    """The tickets that wait for one stage, in order, with those that came back ahead of the new ones.

    Args:
        name: of the stage that takes from it.
        producers: names of those that put into it; each ends with its sentinel.
        capacity: tickets above which the producers are held back.
    """

    def __init__(self, name: str, producers: Iterable[str], capacity: int = 256) -> None:
        self.name = name
        self.capacity = capacity
        self._open = set(producers)
        self._tickets: deque[Ticket] = deque()
        self._alone: deque[Ticket] = deque()
        self.n_atoms = 0  # of all that wait; kept, as streams may be long

    def put(self, tickets: Iterable[Ticket], producer: str) -> None:
        assert producer in self._open, f"{producer} put into {self.name} after its sentinel"
        for ticket in tickets:
            self._tickets.append(ticket)
            self.n_atoms += ticket.n_atoms

    def put_back(self, tickets: Iterable[Ticket]) -> None:
        """Tickets that were taken return; they go first, the suspects among them to a queue of their own."""
        for ticket in reversed(list(tickets)):
            (self._alone if ticket.is_alone else self._tickets).appendleft(ticket)
            self.n_atoms += ticket.n_atoms

    def end(self, producer: str) -> None:
        """The sentinel: this producer will put nothing more. To say so twice changes nothing."""
        self._open.discard(producer)

    def take(self, atoms: float, tickets: int | None = None) -> list[Ticket]:
        """Tickets from the front, at least one if any waits, at most about `atoms` atoms."""
        taken: list[Ticket] = []
        total = 0
        while self._tickets and (tickets is None or len(taken) < tickets):
            if taken and total + self._tickets[0].n_atoms > atoms:
                break
            ticket = self._tickets.popleft()
            total += ticket.n_atoms
            taken.append(ticket)
        self.n_atoms -= total
        return taken

    def take_alone(self) -> list[Ticket]:
        """The next ticket that must be tried without company, if there is one."""
        if not self._alone:
            return []
        ticket = self._alone.popleft()
        self.n_atoms -= ticket.n_atoms
        return [ticket]

    @property
    def has_suspects(self) -> bool:
        return bool(self._alone)

    @property
    def is_full(self) -> bool:
        return len(self) >= self.capacity

    @property
    def is_ended(self) -> bool:
        """All producers have sent their sentinel and nothing waits; taken tickets may still come back."""
        return not self._open and not len(self)

    def __len__(self) -> int:
        return len(self._tickets) + len(self._alone)

    def __repr__(self) -> str:
        return f"Stream({self.name!r}, {len(self)} waiting, open: {', '.join(sorted(self._open)) or 'none'})"


__all__ = ["MAX_DEATHS", "Parcel", "Stream", "Ticket"]

"""What goes wrong among ranks, by name, and how a rank's error travels to the others."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Protocol

#: The attribute of an exception that all ranks of a mesh have raised together, and what it holds: which mesh.
_COMMON = "_raised_by_mesh"


class MeshError(RuntimeError):
    """Ranks lost each other: a peer died, failed, closed its mesh, or did not answer within the timeout."""


class RankFailed(MeshError):
    """A peer failed with an error of its own, which it told: ``rank 3 failed: ValueError: what it said``."""


@dataclass(frozen=True)
class Fault:
    """Last words of a rank. `own`: whether an error of its own ended it, rather than the loss of a peer."""

    text: str
    own: bool

    def pack(self) -> bytes:
        return (b"!" if self.own else b"?") + self.text.encode(errors="replace")

    @classmethod
    def unpack(cls, words: bytes) -> Fault:
        return cls(words[1:].decode(errors="replace"), words[:1] == b"!")

    def error(self) -> MeshError:
        return RankFailed(self.text) if self.own else MeshError(self.text)


def text_of(error: BaseException) -> str:
    """Type and text, as in the last line of a traceback."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # whatever a class of somebody else's raises when it is printed
        return type(error).__name__


@dataclass(frozen=True)
class Thrown:
    """An exception on its way to other ranks: its text, and itself, pickled, if it can be."""

    text: str
    data: bytes | None

    @classmethod
    def of(cls, error: Exception) -> Thrown:
        text = text_of(error)
        try:
            return cls(text, pickle.dumps(error, protocol=5))
        except Exception:  # whatever a class of somebody else's raises: the text goes on its way without it
            return cls(text, None)

    def copy(self) -> Exception:
        """The exception again. Its class may be unknown here, or want other arguments than it keeps."""
        if self.data is None:
            return RuntimeError(self.text)
        try:
            error = pickle.loads(self.data)
        except Exception:  # as above
            return RuntimeError(self.text)
        # What came back may be something else: a class can say how it is pickled.
        same = isinstance(error, Exception) and text_of(error) == self.text
        return error if same else RuntimeError(self.text)


class Guarded(Protocol):
    """What a guard needs of a mesh."""

    name: str
    size: int

    def fail(self, error: BaseException) -> None: ...


def mark_common(error: Exception, mesh: str) -> None:
    """All ranks of the mesh of this name raise it together: none has to be told."""
    error.__dict__[_COMMON] = mesh


class Guard:
    """See `Mesh.guard`."""

    __slots__ = ("_mesh",)

    def __init__(self, mesh: Guarded) -> None:
        self._mesh = mesh

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or self._mesh.size == 1:
            return
        # A generator that is closed has not failed.
        if not isinstance(error, GeneratorExit) and error.__dict__.get(_COMMON) != self._mesh.name:
            self._mesh.fail(error)


__all__ = ["Fault", "Guard", "MeshError", "RankFailed", "Thrown", "mark_common", "text_of"]

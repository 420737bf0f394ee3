"""What goes wrong among ranks, by name, and how a rank's error travels to the others."""

from __future__ import annotations

import pickle
from dataclasses import dataclass


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


__all__ = ["Fault", "MeshError", "RankFailed", "Thrown", "text_of"]

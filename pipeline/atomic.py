"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from .folder import sync_directory


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, sync: bool = True) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place at the end; on an error it is removed.

    Whoever reads `path` sees the old file or the new one, at any instant, also after a kill or a power cut.
    A writer that is killed leaves a ``.tmp-…`` file, see `remove_leftovers`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".tmp-{uuid.uuid4().hex[:12]}-{path.name[-60:]}")
    try:
        yield draft
        if sync:
            descriptor = os.open(draft, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace a text file in one step."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def remove_leftovers(folder: str | os.PathLike[str]) -> int:
    """Remove what killed writers left below a folder; only for who holds its lock. Returns how many."""
    leftovers = list(Path(folder).rglob(".tmp-*"))
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)
    return len(leftovers)


__all__ = ["remove_leftovers", "replacing", "write_text"]

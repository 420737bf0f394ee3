"""How crowded a system is: the mean number of neighbours of its atoms, from a sample."""

from __future__ import annotations

import numpy as np

from .frame import Frame, sample

# Atoms whose neighbours are counted, and atoms among which they are.
_CENTRES, _AMONG = 32, 4096


def mean_neighbors(frame: Frame, fractional: np.ndarray, reach: float) -> float:
    """Mean number of atoms, images included, within `reach` Å of an atom.

    Within some 10 per cent; a pure function of its arguments, the same on every rank. Takes about a millisecond.

    Args:
        frame, fractional: the system, (n, 3), wrapped.
    """
    n = len(fractional)
    if n == 0 or reach <= 0:
        return 0.0
    among = fractional[sample(n, _AMONG)]
    centres = among[sample(len(among), _CENTRES)]
    margin = reach / frame.heights
    i, j = (k.ravel() for k in np.indices((len(centres), len(among))))
    apart = np.zeros((0, len(i)))
    # Axis by axis, so that few pairs are left before anything else is worked out.
    for axis in range(3):
        along = among[j, axis] - centres[i, axis]
        images = np.zeros(1)
        if frame.periodic[axis]:
            # The nearest image lies within half a cell, those farther out up to the margin beyond it.
            along -= np.round(along)
            far = int(margin[axis] + 0.5)
            images = np.arange(-far, far + 1, dtype=np.float64)
        places = images[:, None] + along
        which, pair = np.nonzero(np.abs(places) <= margin[axis])
        i, j, apart = i[pair], j[pair], np.vstack([apart[:, pair], places[which, pair]])
    squared = np.zeros(len(i))
    for axis in range(3):
        side = apart[0] * frame.box[0, axis] + apart[1] * frame.box[1, axis] + apart[2] * frame.box[2, axis]
        squared += side * side
    # Every centre has found itself; the others stand for all atoms there are.
    others = np.count_nonzero(squared < reach * reach) / len(centres) - 1.0
    return float(others * (n - 1) / (len(among) - 1) if n > len(among) else others)


__all__ = ["mean_neighbors"]

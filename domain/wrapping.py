"""Wrapped coordinates and image counts: functions of unwrapped positions and the cell, worked out when asked for.

The state keeps unwrapped positions only, so nothing can get out of step with them: what a user of other codes finds in
`ix iy iz` or `image` is `image_counts` here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .frame import Frame

_MOST = float(np.iinfo(np.int32).max)


def image_counts(positions: np.ndarray, cell: np.ndarray, periodic: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each atom of one system lies in its cell, and how many cells away its position is.

    Args:
        positions: float64 (n, 3), Å, anywhere.
        cell: float64 (3, 3), Å, lattice vectors as rows. periodic: bool (3,).

    Returns:
        wrapped float64 (n, 3) and image int32 (n, 3): ``positions = wrapped + image @ cell``; the image is 0 along axes
        that are not periodic. Fractions along the cell's vectors (as in ASE, perpendicular ones where it has none) lie
        in [0, 1) along periodic axes: exactly where the vector is parallel to x, y or z and no other leans against it,
        else to round-off. An atom that is in the cell already keeps its bits.

    Raises:
        ValueError: positions that are not finite or billions of cells away; periodic vectors that span no cell.
    """
    positions = np.asarray(positions, dtype=np.float64)
    if not np.isfinite(positions).all():
        raise ValueError("positions must be finite to lie in a cell")
    frame = _frame(np.asarray(cell, dtype=np.float64), np.asarray(periodic, dtype=bool))
    whole = np.floor(frame.fractional(positions))[:, frame.periodic]
    if whole.size and np.abs(whole).max() >= _MOST:
        raise ValueError(f"positions must be within 2^31 cells of the origin, one is {np.abs(whole).max():.3g} away")
    _, image = frame.wrap(positions)
    wrapped = positions.copy()
    for axis in np.flatnonzero(frame.periodic):
        # Plain products and sums: the bits of a row depend on nothing but the row.
        wrapped -= image[:, axis, None] * frame.box[axis]
    for axis in np.flatnonzero(frame.periodic):
        _settle(wrapped, image, frame.box, int(axis))
    return wrapped, image


def _frame(cell: np.ndarray, periodic: np.ndarray) -> Frame:
    """Axes along all vectors that the cell has, periodic or not, so that fractions are those that users know."""
    Frame.of(cell, periodic)  # raises for periodic vectors that are none
    there = periodic | (np.isfinite(cell).all(axis=1) & cell.any(axis=1))
    try:
        return replace(Frame.of(cell, there), periodic=periodic)
    except ValueError:  # the vectors of other axes depend on these: they mean nothing
        return Frame.of(cell, periodic)


def _settle(wrapped: np.ndarray, image: np.ndarray, box: np.ndarray, axis: int) -> None:
    """Mend what round-off has left a hair outside, in place, along an axis where it can be told exactly."""
    along = np.flatnonzero(box[axis])
    if len(along) != 1 or np.count_nonzero(box[:, along[0]]) != 1:
        return
    length = abs(box[axis, along[0]])
    x = np.sign(box[axis, along[0]]) * wrapped[:, along[0]]
    over = x >= length
    x[over] -= length
    image[over, axis] += 1
    below = np.flatnonzero(x < 0.0)
    lifted = x[below] + length
    # So little below 0 that one cell further up it would be the upper face.
    face = lifted >= length
    x[below] = np.where(face, 0.0, lifted)
    image[below[~face], axis] -= 1
    wrapped[:, along[0]] = np.sign(box[axis, along[0]]) * x


__all__ = ["image_counts"]

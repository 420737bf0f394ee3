"""The frame of a system: fractional coordinates of one reference cell, its faces in the vacuum if there is one.

In plain products and sums: every rank must get the same bits, and BLAS promises none.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from .neighbors import FAR, full_box
from .units import heights

# Vacuum is looked for on so many bins along an axis, in a sample of so many atoms.
_BINS, SAMPLE = 64, 1536
# A bin with less than this share of the mean still counts as vacuum: some atoms of vapour do not fill it.
_VAPOUR = 0.05


@dataclass(frozen=True)
class Frame:
    """Fractional coordinates of one reference cell.

    Attributes:
        box: (3, 3), Å, lattice vectors as rows; unit vectors along axes that are not periodic.
        inverse: (3, 3), its inverse.
        heights: (3,), Å, thickness of the cell along each axis.
        periodic: (3,) bool.
        origin: (3,), where coordinates start, as a fraction of the cell; 0 unless faces were moved into a vacuum.
    """

    box: np.ndarray
    inverse: np.ndarray
    heights: np.ndarray
    periodic: np.ndarray
    origin: np.ndarray = field(default_factory=lambda: np.zeros(3))

    @classmethod
    def of(cls, cell: np.ndarray, periodic: np.ndarray) -> Frame:
        """Raises ValueError for periodic axes whose vectors are zero, dependent or not finite."""
        periodic = np.asarray(periodic, dtype=bool)
        box = full_box(np.asarray(cell, dtype=np.float64), periodic)
        return cls(box, _inverse(box), heights(box), periodic)

    def fractional(self, positions: np.ndarray) -> np.ndarray:
        """(n, 3) Å -> (n, 3)."""
        x, m, o = positions, self.inverse, self.origin
        return np.stack([x[:, 0] * m[0, a] + x[:, 1] * m[1, a] + x[:, 2] * m[2, a] - o[a] for a in range(3)], axis=1)

    def wrap(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fractional coordinates in [0, 1) along periodic axes, and the image each atom sits in.

        Returns:
            fractional (n, 3) and image int32 (n, 3): positions = (origin + fractional + image) @ box.

        Raises:
            ValueError: an atom so many cells away that their number has no 32 bits, or the rest no digits.
        """
        fractional = self.fractional(positions)
        image = np.floor(fractional)
        image[:, ~self.periodic] = 0.0
        farthest = np.abs(image).max(initial=0.0)
        if farthest > FAR:
            raise ValueError(
                f"atoms must be within {FAR:g} cells of the origin, one is {farthest:.3g} away: wrap them first"
            )
        fractional = fractional - image
        # -1e-17 lies in image -1 at a fraction that rounds to 1: it belongs to the start of image 0.
        over = self.periodic & (fractional >= 1.0)
        image[over] += 1.0
        fractional[over] = 0.0
        return fractional, image.astype(np.int32)

    def clear_of(self, fractional: np.ndarray, least: float) -> Frame:
        """The same cell with its faces in the middle of the largest vacuum along each periodic axis.

        A slab, wire or droplet that lies across a face is then in one piece, wherever it drifts. Nothing changes along
        axes without a vacuum of `least` Å.

        Args:
            fractional: (n, 3), coordinates wrapped into this frame.
        """
        origin = self.origin.copy()
        for axis in np.flatnonzero(self.periodic).tolist():
            start, length = vacuum(fractional[sample(len(fractional)), axis])
            if length > 0 and length * self.heights[axis] >= least:
                middle = self.origin[axis] + start + 0.5 * length
                origin[axis] = middle - np.floor(middle)
        return self if np.array_equal(origin, self.origin) else replace(self, origin=origin)


def vacuum(values: np.ndarray) -> tuple[float, float]:
    """The largest vacuum along a periodic axis: where it starts, in [0, 1), and how long it is; (0, 0) if none.

    Of several, the one at the face is preferred if it is at least half as long as the longest.

    Args:
        values: (n,), coordinates in [0, 1).
    """
    if not len(values):
        return 0.0, 0.0
    counts = np.bincount((values * _BINS).astype(np.int64), minlength=_BINS)[:_BINS]
    empty = counts <= _VAPOUR * len(values) / _BINS
    full = np.flatnonzero(~empty)
    after = np.append(full[1:], full[0] + _BINS)
    runs = after - full - 1
    # The last run is the one that reaches the face or crosses it.
    best = int(np.argmax(runs))
    if 2 * runs[-1] >= runs[best]:
        best = len(runs) - 1
    start, length = full[best] + 1, runs[best]
    return (float(start / _BINS), float(length / _BINS)) if length else (0.0, 0.0)


def sample(n: int, most: int = SAMPLE) -> np.ndarray:
    """Places of at most `most` of n atoms, int64, ascending: one of each stretch of n / most, at a place in it that
    no lattice can be in step with (golden-ratio sequence)."""
    if n <= most:
        return np.arange(n, dtype=np.int64)
    k = np.arange(most, dtype=np.float64)
    jitter = k * 0.6180339887498949 % 1.0
    return ((k + jitter) * (n / most)).astype(np.int64)


def _inverse(m: np.ndarray) -> np.ndarray:
    rows = [[float(v) for v in row] for row in m]
    (a, b, c), (d, e, f), (g, h, i) = rows
    adjugate = [
        [e * i - f * h, c * h - b * i, b * f - c * e],
        [f * g - d * i, a * i - c * g, c * d - a * f],
        [d * h - e * g, b * g - a * h, a * e - b * d],
    ]
    determinant = a * adjugate[0][0] + b * adjugate[1][0] + c * adjugate[2][0]
    return np.array([[v / determinant for v in row] for row in adjugate])


__all__ = ["Frame", "sample", "vacuum"]

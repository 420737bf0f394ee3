"""Pairs within reach by a list of cells, on one CPU thread, with the geometry in float64.

Every image that may come within reach of a receiver is first written out as a row of its own, so that the search knows
neither lattice nor wrapping and serves cells of any shape, also ones much smaller than the reach. All rows are sorted
into bins by counting, and every receiver walks the bins that its sphere touches, one line of bins along x at a time:
such a line is one stretch of memory. Bins are as wide as the reach across a line, but eight to the reach along it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, prod
from operator import sub

import numpy as np
import torch

from .cell_kernels import search, sort_into_bins, survey, write_images
from .kernels import launch

#: Bins along x to the reach: their only cost is memory, and long thin spheres of them waste few candidates.
_FINE = 8
#: At most so many bins for each row, so that empty space costs nothing; and as many as are free of charge.
_BINS_PER_ROW, _BINS_FREE = 4, 4096
#: Relative margin by which everything but the distance itself is generous: round-off must not lose a pair.
_SLACK = 1e-9
_MOST = 2**31 - 1

Vector = tuple[float, float, float]


class Search:
    """A survey of the points, which the caller may act upon, then the pairs.

    Args:
        points: float64, (n, 3), contiguous.
        receives: uint8, (n,): which points get a list.
        box: three lattice vectors, zero for axes that are not periodic.
        dual: three vectors d, x · d being a fractional coordinate; zero likewise.
        margin: the reach in fractional coordinates, zero for axes that are not periodic.
        reach: Å.

    Attributes:
        bad, first_bad: how many points are not finite, and the first of them.
        spread, farthest: largest extent of the finite points along a periodic axis, and how far the farthest of them
            lies from the origin, in lattice vectors.
    """

    def __init__(
        self,
        points: np.ndarray,
        receives: np.ndarray,
        box: Sequence[Vector],
        dual: Sequence[Vector],
        margin: Vector,
        reach: float,
    ) -> None:
        self.points, self.receives, self.reach, self.margin = points, receives, reach, margin
        self._frame = np.array([*box, *dual, *[(0.0, 0.0, 0.0)] * 4])
        found = np.full((7, 3), np.inf)
        found[1::2] = -np.inf
        launch(survey, 1, *_tensors(points, receives, self._frame, found))
        # As plain floats from here: on three numbers numpy spends its time on getting ready.
        near_low, near_high, self._low, self._high, low, high, (bad, first_bad, _) = found.tolist()
        self.bad, self.first_bad = int(bad), int(first_bad)
        self.spread = max(map(sub, high, low))
        self.farthest = max(map(abs, low + high))
        self._near = near_low, near_high

    def pairs(self, n_owned: int, half: bool) -> tuple[np.ndarray, ...]:
        """The pairs; `half`: those of two owned points (or images of them) once, and by upper images.

        Returns:
            image_of, image_shift, first, count, neighbors, boundary, as in `SystemList`.

        Raises:
            ValueError: more images or pairs than 32 bits count.
        """
        n, n_half = len(self.points), n_owned if half else 0
        sizes = np.zeros(3, dtype=np.int64)
        rows, image_of, image_shift = self._images(n_half, sizes)
        m = len(rows) - n
        grid, shape, rows = self._grid(rows)
        start = np.zeros(2 * int(shape.prod()) + 2, dtype=np.int32)
        bin_of, row_at, slot_of = np.empty((3, n + m), dtype=np.int32)
        sorting = _tensors(grid, shape, bin_of, start, places := np.empty((n + m, 3)), row_at, slot_of)
        launch(sort_into_bins, 1, torch.from_numpy(rows), n_half, *sorting)
        first, count = np.empty((2, n), dtype=np.int32)
        boundary, used = np.zeros(n_owned, dtype=np.uint8), np.empty(m, dtype=np.int32)
        room = self._room(n + m, half)
        while True:
            neighbors, number = np.empty(room, dtype=np.int32), np.full(m, -1, dtype=np.int32)
            arrays = (grid, shape, start, places, row_at, slot_of, image_of, number, used, first, count, boundary)
            launch(
                search,
                1,
                *_tensors(rows, self.receives),
                n_half,
                n_owned,
                self.reach,
                *_tensors(*arrays, neighbors, sizes),
            )
            _, found, images = sizes.tolist()
            # What the search leaves free behind the last pair is its proof that it was never short of room.
            if found + n + m <= room:
                used = used[:images]
                return image_of[used], image_shift[used], first, count, neighbors[:found], boundary
            room = _counted(found + n + m, "pairs", self.reach)

    def _images(self, n_half: int, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The points and their images as rows; point and shift of every image."""
        points, n = self.points, len(self.points)
        if not any(self.margin):
            return points, np.empty(0, dtype=np.int32), np.empty((0, 3), dtype=np.int32)
        pad = self._pad()
        # A fractional coordinate is as exact as the Cartesian ones it is worked out from.
        steep = max(self.margin) / self.reach
        slack = _SLACK + 1e-14 * steep * (pad + max(map(abs, self._low + self._high)))
        low = [f - margin - slack for f, margin in zip(self._near[0], self.margin, strict=True)]
        high = [f + margin + slack for f, margin in zip(self._near[1], self.margin, strict=True)]
        self._frame[6:] = low, high, [x - pad for x in self._low], [x + pad for x in self._high]
        copies = prod(floor(extent) + 1 for extent in map(sub, high, low))
        room = _counted(n * copies, "images", self.reach)
        rows, image_of = np.empty((n + room, 3)), np.empty(room, dtype=np.int32)
        image_shift = np.empty((room, 3), dtype=np.int32)
        arrays = _tensors(self._frame, rows, image_of, image_shift, sizes)
        launch(write_images, 1, torch.from_numpy(points), n_half, *arrays)
        m = int(sizes[0])
        return rows[: n + m], image_of[:m], image_shift[:m]

    def _pad(self) -> float:
        """The reach and what round-off may take from it."""
        return self.reach + _SLACK * self.reach + 1e-14 * max(map(abs, self._low + self._high))

    def _grid(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Origin, bins per Å, widths and the radius to look within, (4, 3); bins per axis; and the rows, squeezed."""
        low, extent, pad = self._low, list(map(sub, self._high, self._low)), self._pad()
        most = max(_BINS_FREE, _BINS_PER_ROW * len(rows))
        bins = _bins(extent, pad, most, pad)
        if bins is None:
            rows = _squeezed(rows, 2.0 * pad)
            of_receivers = rows[: len(self.points)][self.receives != 0]
            low, extent = of_receivers.min(axis=0).tolist(), np.ptp(of_receivers, axis=0).tolist()
            width = pad
            while bins is None:
                bins = _bins(extent, pad, most, width)
                width *= 1.2
        widths, shape = bins
        grid = np.array([[x - pad for x in low], [1.0 / width for width in widths], widths, [pad] * 3])
        return grid, np.array(shape, dtype=np.int32), rows

    def _room(self, n_rows: int, half: bool) -> int:
        """Where to begin with the length of the list: twice what it takes if the receivers fill their bounds evenly."""
        n, reach = len(self.points), self.reach
        pairs = n * n_rows
        if pairs > 1 << 16:
            filled = prod(max(extent, 0.5 * reach) for extent in map(sub, self._high, self._low))
            pairs = int(min(pairs, n * (n / filled) * 4.2 * reach**3 * (1.0 if half else 2.0)))
        return min(pairs + n_rows, _MOST)


def _tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays]


def _counted(number: int, what: str, reach: float) -> int:
    if number > _MOST:
        raise ValueError(f"a list holds at most {_MOST} {what}, at a reach of {reach} Å there would be {number}")
    return number


def _bins(extent: list[float], pad: float, most: int, width: float) -> tuple[Vector, tuple[int, int, int]] | None:
    """Widths of bins and their number per axis, as fine along x as the number allowed permits; None if none does."""
    x, y, z = (length + 2.0 * pad for length in extent)
    across = floor(y / width) + 1, floor(z / width) + 1
    for fine in (_FINE, 4, 2, 1):
        along = floor(x * fine / width) + 1
        if along * across[0] * across[1] <= most:
            return (width / fine, width, width), (along, *across)
    return None


def _squeezed(rows: np.ndarray, gap: float) -> np.ndarray:
    """The rows with empty space wider than `gap` along x, y or z cut down to it: near pairs stay as they were."""
    moved = np.empty_like(rows)
    for axis in range(3):
        order = np.argsort(rows[:, axis], kind="stable")
        sorted_ = rows[order, axis]
        excess = np.maximum(np.diff(sorted_) - gap, 0.0)
        moved[order[:1], axis] = sorted_[:1]
        moved[order[1:], axis] = sorted_[1:] - np.cumsum(excess)
    return moved

"""Where planes divide a system: at quantiles of its atoms, in gaps between them, never too close together.

Nested cuts (recursive multisection; Berger and Bokhari, IEEE Trans. Comput. C-36, 570 (1987), for bisection): planes
along the first axis divide the system into slabs of equally many atoms; each slab is divided along the second axis at
its own quantiles, each of those columns along the third. So every domain has its share, whatever the shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: planes within this share of a domain's atoms are as good as the exact quantile: the widest gap among them is taken
WINDOW = 0.01
# Atoms sampled to find out between which values a quantile lies, and how far off the sample may be, in atoms of it.
_SAMPLE, _SLACK = 1024, 24


def nested(
    fractional: np.ndarray,
    dims: Sequence[int],
    order: Sequence[int],
    thinnest: np.ndarray,
    window: float = WINDOW,
) -> list[np.ndarray]:
    """Planes of a grid, level by level.

    Args:
        fractional: (n, 3), coordinates wrapped into [0, 1) along periodic axes.
        dims: domains along each axis. order: the axes, in the order in which they are cut.
        thinnest: (3,), least thickness of a domain along each axis, fractional; 0 along axes that are not periodic.
        window: how far planes may lie off the quantiles, as a share of a domain's atoms, where gaps are wider.

    Returns:
        Three arrays (blocks, dims[axis] - 1), ascending: planes along order[0] of the one whole, along order[1] of
        each slab, along order[2] of each column, blocks numbered as they are cut.
    """
    block = np.zeros(len(fractional), dtype=np.int16)
    n_blocks, levels = 1, []
    for axis in order:
        parts = dims[axis]
        if parts == 1:
            levels.append(np.zeros((n_blocks, 0)))
            continue
        values = fractional[:, axis]
        groups = [values]
        if n_blocks > 1:
            # int16 keys are sorted by radix; a mask for every block takes as long each.
            by_block = values[np.argsort(block, kind="stable")]
            groups = np.split(by_block, np.cumsum(np.bincount(block, minlength=n_blocks))[:-1])
        planes = np.array([_planes(group, parts, float(thinnest[axis]), window) for group in groups])
        levels.append(planes)
        if axis != order[-1]:
            block = descend(block, planes, values)
        n_blocks *= parts
    return levels


def descend(block: np.ndarray, planes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The block of the next level in which each atom lies: block * parts + its place among the planes of its block.

    An atom exactly on a plane belongs to the block above it.
    """
    parts = planes.shape[1] + 1
    place = block * np.int16(parts)
    for k in range(parts - 1):
        place += values >= (planes[0, k] if len(planes) == 1 else planes[:, k][block])
    return place


def _planes(values: np.ndarray, parts: int, thinnest: float, window: float) -> np.ndarray:
    """Planes (parts - 1,) that divide these coordinates evenly; at least `thinnest` apart and off 0 and 1, if not 0."""
    n = len(values)
    if n < 2:
        return np.arange(1, parts) / parts
    if n <= 8 * _SAMPLE:
        values = np.sort(values)
    off = int(window * n / parts)
    planes = np.array([_gap(values, min(max(round(k * n / parts), 1), n - 1), off) for k in range(1, parts)])
    edges = np.concatenate([[0.0], planes, [1.0]])
    if thinnest > 0 and (edges[1:] - edges[:-1]).min() < thinnest:
        return _spaced(np.sort(values), parts, thinnest)
    return planes


def _gap(values: np.ndarray, middle: int, window: int) -> float:
    """A plane below the `middle`-th value or so: in the middle of the widest gap within a window of it."""
    low, high = max(1, middle - window), min(len(values) - 1, middle + window)
    near = order_statistics(values, low - 1, high)
    if low == high:
        return 0.5 * (float(near[0]) + float(near[1]))
    gaps = near[1:] - near[:-1]
    best = np.flatnonzero(gaps >= gaps.max() * (1 - 1e-9))
    at = int(best[np.argmin(np.abs(best + low - middle))])
    return float(0.5 * (near[at] + near[at + 1]))


def order_statistics(values: np.ndarray, low: int, high: int) -> np.ndarray:
    """np.sort(values)[low : high + 1], at a fraction of the cost: of many values only those near are sorted.

    Args:
        values: (n,), ascending if there are no more than 8192.
    """
    n = len(values)
    if n <= 8 * _SAMPLE:
        return values[low : high + 1]
    every = np.sort(values[:: n // _SAMPLE])
    m = len(every)
    first, last = low * m // n - _SLACK, high * m // n + 1 + _SLACK
    if first >= 0 and last < m:
        above = values >= every[first]
        inside = values[above & (values <= every[last])]
        below = n - int(np.count_nonzero(above))
        if below <= low and high < below + len(inside):
            return np.sort(inside)[low - below : high + 1 - below]
    return np.sort(values)[low : high + 1]


def _spaced(ordered: np.ndarray, parts: int, thinnest: float) -> np.ndarray:
    """Planes at least `thinnest` apart and off 0 and 1 that leave as few atoms as possible in the fullest part.

    By dynamic programming over positions k * thinnest + u, u not decreasing with k: with a grid of u, and those at
    which a plane meets a quantile. Costs are 16th powers of shares: as good as the maximum, and ties are told apart.
    """
    n, slack = len(ordered), max(0.0, 1.0 - parts * thinnest)
    starts = thinnest * np.arange(1, parts)
    quantiles = ordered[np.arange(1, 2 * parts) * n // (2 * parts)]
    u = np.concatenate([np.linspace(0.0, slack, 33), (quantiles[:, None] - starts).ravel()])
    u = np.unique(np.clip(u, 0.0, slack))
    below = np.searchsorted(ordered, starts[:, None] + u, side="left") / n
    cost = _power16(below[0])
    choices = []
    for k in range(1, parts - 1):
        total = np.where(u[:, None] <= u, cost[:, None] + _power16(below[k] - below[k - 1][:, None]), np.inf)
        choices.append(np.argmin(total, axis=0))
        cost = total[choices[-1], np.arange(len(u))]
    picked = [int(np.argmin(cost + _power16(1.0 - below[-1])))]
    for choice in reversed(choices):
        picked.insert(0, int(choice[picked[0]]))
    return starts + u[picked]


def _power16(x: np.ndarray) -> np.ndarray:
    for _ in range(4):
        x = x * x
    return x


__all__ = ["WINDOW", "descend", "nested", "order_statistics"]

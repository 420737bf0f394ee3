"""Memory: what a system will need on the fullest of its ranks, and on which grid it fits.

A rank holds its own atoms, the ghosts it sees, periodic images of both, and the pairs of all that; with deep message
passing on many ranks ghosts are most of it. All of this is predicted from a sample of the atoms before anything is
allocated, within some 30 per cent, alike on every rank.
"""

from __future__ import annotations

import math
import socket
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from .arrangement import Arranger, Dims, possible
from .density import mean_neighbors
from .fields import declare_own_field
from .frame import SAMPLE, Frame, sample
from .halo import Sight, ghosts, receiving, sight_of
from .partition import WHOLE, RankGrid, grid_for

if TYPE_CHECKING:
    from .mesh import Mesh
    from .models.base import Model
    from .strategy import Strategy

GIB = float(2**30)
# Of what a device has so much is planned with; and below so much nobody is refused for want of memory, unless the
# caller set the limit.
_SHARE, _FLOOR = 0.8, 0.25 * GIB
# A grid that was chosen for memory is kept up to so much more: atoms have moved since, and predictions with them.
_SLACK = 1.1
# More neighbours than this has no atom within any reach in use: for a bound that costs nothing.
_CROWDED = 1000.0


# Domains per axis that were chosen for want of memory when the system came aboard; zeros: none were. It goes on with
# the same ones elsewhere, to the last bit, as long as they are possible there.
declare_own_field("memory_grid", "system", (3,), dtype=torch.int32, fill=0)


@dataclass(frozen=True)
class Footprint:
    """Bytes a rank needs for one system, linear in what it holds of it.

    The runner's own numbers were measured: all arrays of a runner on the CPU, and the peak of its process while lists
    are rebuilt, for 32,000 to 256,000 atoms at 9 to 98 pairs an atom.

    Attributes:
        base: for any system.
        whole: per atom of the system, wherever it is: records, and all reference positions while lists are rebuilt.
        atom: per own atom: the fields of its state, twice while rows change.
        ghost: per remote ghost: buffers of the exchange.
        node: per own atom or ghost. row: per own atom, ghost or image. pair: per pair of the list.
    """

    base: float
    whole: float
    atom: float
    ghost: float
    node: float
    row: float
    pair: float

    @classmethod
    def of(cls, model: Model, strategy: Strategy, row_bytes: int) -> Footprint:
        """Of a model's systems.

        Args:
            model: its `bytes_per_node` and `bytes_per_edge` are what it needs at the peak of its computing. Where it
                does not say: 64 a node, and in graph networks 512 an edge and layer.
            row_bytes: of all per-atom fields of the state, see `migrate.row_bytes`.
        """
        node = 64.0 if model.bytes_per_node is None else float(model.bytes_per_node)
        guess = 0.0 if strategy.pairs == "half" else 512.0 * model.hops
        edge = guess if model.bytes_per_edge is None else float(model.bytes_per_edge)
        if strategy.pairs == "full":
            edge += 24.0  # nodes at either end, and where the sender's image stands
        return cls(
            base=2**18, whole=90.0, atom=1.25 * row_bytes + 60.0, ghost=120.0, node=80.0 + node, row=75.0,
            pair=(0.0 if strategy.pairs == "none" else 12.5) + edge,
        )  # fmt: skip

    def bytes(self, n_atoms: int, owned: float, ghosts: float, images: float, pairs: float) -> float:
        """Of one rank."""
        nodes = owned + ghosts
        fixed = self.base + self.whole * n_atoms + self.atom * owned + self.ghost * ghosts
        return fixed + self.node * nodes + self.row * (nodes + images) + self.pair * pairs


@dataclass(frozen=True)
class Need:
    """What the rank that needs most will hold of one system.

    Attributes:
        n_atoms: of the whole system.
        n_domains: how many ranks it is on.
        owned, ghosts, images: rows there. pairs: of its list, or of the model's own graph.
        bytes: all of it.
    """

    n_atoms: int
    n_domains: int
    owned: int
    ghosts: int
    images: int
    pairs: int
    bytes: float


@dataclass(frozen=True)
class Crowd:
    """What planning knows about a system.

    Attributes:
        frame: its cell. points: (m, 3), wrapped coordinates of a sample of its atoms. n_atoms: how many there are.
        neighbors: mean number within cutoff + skin of an atom.
    """

    frame: Frame
    points: np.ndarray
    n_atoms: int
    neighbors: float

    @classmethod
    def of(cls, frame: Frame, fractional: np.ndarray, strategy: Strategy) -> Crowd:
        """From where its atoms are, (n, 3), wrapped."""
        n = len(fractional)
        return cls(frame, fractional[sample(n)], n, mean_neighbors(frame, fractional, strategy.cutoff + strategy.skin))

    @classmethod
    def even(cls, n_atoms: int, cell: np.ndarray, strategy: Strategy) -> Crowd:
        """Of so many atoms that fill a periodic cell (3, 3), Å, evenly: what can be said before there are positions."""
        frame = Frame.of(cell, np.ones(3, dtype=bool))
        # Multiples of powers of the plastic number: points as even as they come (Roberts, 2018).
        steps = 1.2207440846057596 ** -np.arange(1.0, 4.0)
        points = (np.arange(1, min(n_atoms, SAMPLE) + 1)[:, None] * steps) % 1.0
        sphere = 4 / 3 * math.pi * (strategy.cutoff + strategy.skin) ** 3
        return cls(frame, points, n_atoms, n_atoms * sphere / abs(float(np.linalg.det(cell))))


def need_of(crowd: Crowd, grid: RankGrid, strategy: Strategy, footprint: Footprint) -> Need:
    """What a system needs on the fullest rank of a grid."""
    sight = sight_of(crowd.frame, strategy)
    domains = grid.owners(crowd.points)
    scale = crowd.n_atoms / max(len(crowd.points), 1)
    worst: Need | None = None
    for domain in range(grid.n_domains):
        own = np.flatnonzero(domains == domain)
        if not len(own) and worst is not None:
            continue  # a rank without atoms sees nothing
        counts = _held(crowd, grid, domains, sight, domain, strategy)
        owned, seen, images, pairs = (count * scale for count in counts)
        size = footprint.bytes(crowd.n_atoms, owned, seen, images, pairs)
        if worst is None or size > worst.bytes:
            worst = Need(crowd.n_atoms, grid.n_domains, round(owned), round(seen), round(images), round(pairs), size)
    assert worst is not None
    return worst


def _held(
    crowd: Crowd, grid: RankGrid, domains: np.ndarray, sight: Sight, domain: int, strategy: Strategy
) -> tuple[float, float, float, float]:
    """Of the sample: own atoms, ghosts, images and pairs of one domain."""
    own = crowd.points[domains == domain]
    if grid.n_domains > 1:
        atoms, shifts = ghosts(grid, crowd.points, domains, sight, domain)
        seen = crowd.points[atoms] + shifts
    else:
        seen = own[:0]
    if strategy.pairs == "none":
        return len(own), len(seen), 0.0, len(own) * crowd.neighbors
    images = [_images(crowd, grid, points, strategy.cutoff + strategy.skin) for points in (own, seen)]
    if strategy.pairs == "half":
        # Of two own atoms only one sees the other's image.
        return len(own), len(seen), 0.5 * images[0] + images[1], 0.5 * len(own) * crowd.neighbors
    receivers = len(own) + int(np.count_nonzero(receiving(grid, seen, sight, domain)))
    return len(own), len(seen), images[0] + images[1], receivers * crowd.neighbors


def _images(crowd: Crowd, grid: RankGrid, points: np.ndarray, reach: float) -> float:
    """Periodic images of nodes within reach of the cell, along axes that are not divided."""
    times = np.ones(len(points))
    for axis in range(3):
        if crowd.frame.periodic[axis] and not grid.split[axis]:
            margin = reach / crowd.frame.heights[axis]
            times *= np.floor(1 + margin - points[:, axis]) - np.ceil(-margin - points[:, axis]) + 1
    return float((times - 1).sum())


def fitting(
    crowd: Crowd, ranks: int, strategy: Strategy, footprint: Footprint, allowed: float
) -> tuple[Dims | None, Need]:
    """The grid of at most `ranks` domains that costs least among those that fit, and what it needs.

    Returns:
        (None, what the grid that needs least would need) if none fits.
    """
    arranger = Arranger(crowd.frame, crowd.points, strategy.reach, strategy.ghost_work)
    least: Need | None = None
    for dims in sorted(possible(crowd.frame, strategy.reach, ranks), key=lambda dims: (arranger.guess(dims), dims)):
        need = need_of(crowd, _cut(crowd, dims, ranks, strategy), strategy, footprint)
        if need.bytes <= allowed:
            return dims, need
        if least is None or need.bytes < least.bytes:
            least = need
    assert least is not None
    return None, least


def _cut(crowd: Crowd, dims: Dims, ranks: int, strategy: Strategy) -> RankGrid:
    return grid_for(crowd.frame, crowd.points, ranks, strategy.reach, grid=dims) if dims != (1, 1, 1) else WHOLE


def ranks_needed(crowd: Crowd, most: int, strategy: Strategy, footprint: Footprint, allowed: float) -> int | None:
    """The fewest ranks on which a system fits, None if it does not on any number up to `most`: to plan a launch."""
    for ranks in range(1, most + 1):
        if fitting(crowd, ranks, strategy, footprint, allowed)[0] is not None:
            return ranks
    return None


@dataclass(frozen=True)
class Budget:
    """What the systems of one runner need, and what they may have of each rank's memory.

    Attributes:
        model, strategy: whose systems. ranks: how many there are. forced: the grid of every system, if one was given.
        allowed: bytes on a rank.
    """

    model: Model
    strategy: Strategy
    ranks: int
    forced: Dims | None
    allowed: float

    def is_ample(self, frame: Frame, n_atoms: int, row_bytes: int) -> bool:
        """Whether a system fits for sure, however it is divided: by a bound that costs nothing."""
        seen = float(np.prod(1 + 2 * (self.strategy.reach + self.strategy.cutoff) / frame.heights[frame.periodic]))
        rows = n_atoms * max(seen, 2.0)
        footprint = Footprint.of(self.model, self.strategy, row_bytes)
        return footprint.bytes(n_atoms, n_atoms, rows, rows, rows * min(rows, _CROWDED)) <= self.allowed

    def grid(self, frame: Frame, fractional: np.ndarray, row_bytes: int, chosen: RankGrid) -> Dims | None:
        """The grid to take instead of the chosen one, if that needs too much; None if it does not.

        Raises:
            ValueError: none fits; says what would be needed.
        """
        if self.is_ample(frame, len(fractional), row_bytes):
            return None
        crowd = Crowd.of(frame, fractional, self.strategy)
        footprint = Footprint.of(self.model, self.strategy, row_bytes)
        need = need_of(crowd, _cut(crowd, chosen.dims, self.ranks, self.strategy), self.strategy, footprint)
        if need.bytes <= self.allowed:
            return None
        if self.forced is None:
            dims, need = fitting(crowd, self.ranks, self.strategy, footprint, self.allowed)
            if dims is not None:
                return dims
        raise ValueError(why_not(need, self.allowed, self.strategy, self.model.refreshes))

    def bears(self, frame: Frame, fractional: np.ndarray, row_bytes: int, kept: RankGrid) -> bool:
        """Whether a system may keep a grid that was chosen for want of memory before."""
        crowd = Crowd.of(frame, fractional, self.strategy)
        footprint = Footprint.of(self.model, self.strategy, row_bytes)
        return need_of(crowd, kept, self.strategy, footprint).bytes <= _SLACK * self.allowed


def allowance(mesh: Mesh, memory: float | None) -> float:
    """Bytes a rank may use for any one system: what the caller says, else a share of what the worst-off rank can have.

    That is its part of the device, or of the host and of its control group (a container's or a batch job's limit),
    whichever is less. What happens to be free does not matter: it would make grids, and so bits, depend on the hour,
    and fail for good what would fit a minute later. Collective; ranks that were given different numbers go by the
    least.
    """
    given = mesh.max(torch.tensor([-math.inf if memory is None else -float(memory)], dtype=torch.float64))
    if math.isfinite(float(given)):
        return -float(given)
    mine = torch.tensor([[float(number) for place in _places(mesh.device) for number in place]], dtype=torch.float64)
    every = torch.cat(mesh.all_gather_rows(mine)) if mesh.size > 1 else mine
    shares = []
    for place, total in (every[:, :2].unbind(1), every[:, 2:].unbind(1)):
        sharing = (place[:, None] == place).sum(dim=1)
        shares.append(float((total / sharing).min()))
    return max(_FLOOR, _SHARE * min(shares))


def _places(device: torch.device) -> tuple[tuple[int, float], tuple[int, float]]:
    """Where this rank's memory is, as a number that ranks at the same place share, and bytes there in all: of the
    device or host, and of what limits this process in particular."""
    host = zlib.crc32(socket.gethostname().encode())
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        # Ranks that share a device share it by its name.
        return (zlib.crc32(str(properties.uuid).encode(), host), float(properties.total_memory)), (host, math.inf)
    import psutil

    group, limit = min(_limits(), key=lambda one: one[1], default=("", math.inf))
    return (host, float(psutil.virtual_memory().total)), (zlib.crc32(group.encode(), host), limit)


def _limits(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[str, float]]:
    """Control groups of this process that limit its memory, and to how many bytes: version 1 and 2, parents included.

    Where the container's own view starts at its group, the path of the process may not exist; the root does.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path)
        for parent in (group, *group.parents):
            file = base / parent.relative_to("/") / name
            try:
                text = file.read_text().strip()
            except OSError:
                continue
            if text.isdigit():  # "max" is no limit
                yield str(file), float(text)


def why_not(need: Need, allowed: float, strategy: Strategy, refreshes: bool) -> str:
    """One sentence on a system that does not fit, with the numbers, and what to do about it."""
    where = "one rank" if need.n_domains == 1 else f"the fullest of {need.n_domains} ranks"
    ghosts = f" and {need.ghosts:,} ghosts" if need.n_domains > 1 else ""
    remedies = ["use more ranks"]
    if refreshes and strategy.name == "wide":
        remedies.append("strategy='refresh'")
    elif need.ghosts > need.owned:
        remedies = ["use a model with a shorter reach" if not strategy.everything else "use a smaller system"]
    return (
        f"needs about {_size(need.bytes)} on {where} ({need.owned:,} own atoms{ghosts}), "
        f"{_size(allowed)} are allowed: {' or '.join(remedies)}, or allow more (memory=)"
    )


def _size(number: float) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / 2**20:.0f} MiB"


__all__ = ["Budget", "Crowd", "Footprint", "Need", "allowance", "fitting", "need_of", "ranks_needed", "why_not"]

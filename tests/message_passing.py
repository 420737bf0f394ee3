"""A small message-passing potential of the project's own: it proves the strategies of domain decomposition.

It has all that makes graph networks hard to divide: features that travel several hops, vector features (so that
directions matter), forces by autograd through all layers, a virial from edge vectors. It is smooth, has fixed random
weights, and a soft repulsion that keeps hot atoms apart. `dense.py` says the same thing without any list of ours.

| equation | variable |
|---|---|
| s_i = embedding[Z_i], v_i = 0 | features of layer 0 |
| w(d) = env(d) (basis(d) W), four filters of WIDTH each | `filters` |
| a_i = Σ_j w1 s_j + w2 (v_j · u_ij), b_i = Σ_j w3 s_j u_ij + w4 v_j | messages |
| s_i <- s_i + tanh(a_i A + abs(b_i)² B), v_i <- v_i + b_i | update |
| E_i = s_i · readout + ½ Σ_j phi(d_ij) | `energies` |
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mattermill.domain.models.base import Model, ModelOutput

SPECIES = (18, 36)
WIDTH, BASIS = 5, 5
#: Å, distances between which the Gaussians of the basis stand
NEAREST = 1.8
#: eV, Å: phi(d) = STRENGTH exp(-(d - NEAREST) / DECAY) env(d)
STRENGTH, DECAY = 12.0, 0.35
#: about one over the root of the number of neighbours; eV per unit of readout
MESSAGE_SCALE, ENERGY_SCALE = 0.5, 0.15


class Graph(NamedTuple):
    """Directed edges into nodes: vector = x[sender] + offset - x[receiver]."""

    receivers: Tensor
    senders: Tensor
    offsets: Tensor

    def vectors(self, x: Tensor) -> Tensor:
        return x[self.senders] + self.offsets - x[self.receivers]


@dataclass(frozen=True, kw_only=True)
class MessagePassing(Model):
    """The potential, in one of three ways of being divided that differ only in who provides its edges and features.

    Args:
        kind: "wide" declares that it cannot refresh features, "refresh" that it can, "graph" builds its own graph.
        hops: layers. cutoff: Å. seed: of the weights.
    """

    kind: Literal["wide", "refresh", "graph"] = "wide"
    hops: int = 2
    cutoff: float = 3.6
    dtype: torch.dtype = torch.float64
    seed: int = 7

    @property
    def pairs(self) -> str:
        return "none" if self.kind == "graph" else "full"

    @property
    def refreshes(self) -> bool:
        return self.kind == "refresh"

    @property
    def species(self) -> frozenset[int]:
        return frozenset(SPECIES)

    def identity(self) -> dict[str, Any]:
        return {"name": "test-message-passing", "hops": self.hops, "cutoff": self.cutoff, "seed": self.seed}

    def compute(self, nb: Any, *, energy: bool = True, stress: bool = True) -> ModelOutput:
        x = nb.positions[: nb.n_nodes].detach().clone().requires_grad_(True)
        energies, vectors, graph = self.energies(nb, x, weights(self.seed, self.hops))
        by_x, by_vector = torch.autograd.grad(energies.sum(), [x, vectors])
        virial = system_virial(nb, graph, vectors, by_vector) if stress else None
        return ModelOutput(-by_x, energies.detach() if energy else None, virial)

    def graph(self, nb: Any) -> Any:
        """Edges into this rank's receivers."""
        return own_graph(nb, self.cutoff) if self.kind == "graph" else nb.edges()

    def energies(self, nb: Any, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Of the owned atoms, (n_owned,), float64; the edge vectors on which they depend; and the graph."""
        graph = self.graph(nb)
        vectors = graph.vectors(x)
        d2 = (vectors * vectors).sum(dim=1)
        near = torch.nonzero(d2.detach() < self.cutoff**2).squeeze(1)
        receivers, senders = graph.receivers[near], graph.senders[near]
        # Differences of positions in float64; then the model's own precision.
        r = vectors[near].to(self.dtype)
        d = torch.sqrt((r * r).sum(dim=1, keepdim=True))
        u = r / d
        parts = unpack(theta.to(self.dtype), self.hops)
        s = parts["embedding"][(nb.numbers[: nb.n_nodes] == SPECIES[1]).long()]
        v = s.new_zeros((nb.n_nodes, WIDTH, 3))
        edge = Edge(receivers, senders, u, d, self.cutoff)
        for hop in range(self.hops):
            if hop:
                s, v = self.refreshed(nb, s, v, hop)
            s, v = layer(s, v, edge, parts, hop)
        pair = 0.5 * STRENGTH * torch.exp((NEAREST - d) / DECAY) * envelope(d, self.cutoff)
        e = ENERGY_SCALE * (s @ parts["readout"])
        e = e.index_add(0, receivers, pair.squeeze(1))
        return e[: nb.n_owned].double(), vectors, graph

    def refreshed(self, nb: Any, s: Tensor, v: Tensor, hop: int) -> tuple[Tensor, Tensor]:
        """Features of all nodes before layer `hop`: in one exchange."""
        both = nb.refresh(torch.cat([s, v.reshape(-1, 3 * WIDTH)], dim=1))
        return both[:, :WIDTH], both[:, WIDTH:].reshape(-1, WIDTH, 3)


class Edge(NamedTuple):
    """What a layer sees of the edges: nodes (E,), directions (E, 3), lengths (E, 1), Å."""

    receivers: Tensor
    senders: Tensor
    directions: Tensor
    lengths: Tensor
    cutoff: float


def layer(s: Tensor, v: Tensor, edge: Edge, parts: dict[str, Tensor], hop: int) -> tuple[Tensor, Tensor]:
    """One round of messages. s: (n, WIDTH), v: (n, WIDTH, 3)."""
    receivers, senders, u, d, cutoff = edge
    filters = (envelope(d, cutoff) * basis(d, cutoff)) @ parts[f"filters{hop}"]
    w1, w2, w3, w4 = filters.split(WIDTH, dim=1)
    s_j, v_j = s[senders], v[senders]
    scalar = w1 * s_j + w2 * (v_j * u[:, None, :]).sum(dim=2)
    vector = (w3 * s_j)[:, :, None] * u[:, None, :] + w4[:, :, None] * v_j
    a = MESSAGE_SCALE * torch.zeros_like(s).index_add(0, receivers, scalar)
    b = MESSAGE_SCALE * torch.zeros_like(v).index_add(0, receivers, vector)
    return s + torch.tanh(a @ parts[f"A{hop}"] + (b * b).sum(dim=2) @ parts[f"B{hop}"]), v + b


def envelope(d: Tensor, cutoff: float) -> Tensor:
    """(1 - (d/cutoff)²)³: two derivatives vanish at the cutoff."""
    return (1.0 - (d / cutoff) ** 2).clamp(min=0.0) ** 3


def basis(d: Tensor, cutoff: float) -> Tensor:
    """Gaussians over the bond lengths there are: (E, BASIS) of d (E, 1)."""
    centres = torch.linspace(NEAREST, cutoff, BASIS, dtype=d.dtype)
    return torch.exp(-(((d - centres) / (centres[1] - centres[0])) ** 2))


def shapes(hops: int) -> dict[str, tuple[int, ...]]:
    """Of all weights, by name, in the order in which they stand in theta."""
    sizes: dict[str, tuple[int, ...]] = {"embedding": (len(SPECIES), WIDTH), "readout": (WIDTH,)}
    for hop in range(hops):
        sizes[f"filters{hop}"] = (BASIS, 4 * WIDTH)
        sizes[f"A{hop}"] = sizes[f"B{hop}"] = (WIDTH, WIDTH)
    return sizes


@functools.cache
def weights(seed: int, hops: int) -> Tensor:
    """All weights in one vector, float64: random, fixed by the seed."""
    rng = np.random.default_rng(seed)
    parts = []
    for name, shape in shapes(hops).items():
        size = 1.0 if len(shape) == 1 or name == "embedding" else 1.0 / np.sqrt(shape[0])
        parts.append(rng.normal(scale=size, size=shape).ravel())
    return torch.from_numpy(np.concatenate(parts))


def unpack(theta: Tensor, hops: int) -> dict[str, Tensor]:
    """Views of theta by name."""
    parts, at = {}, 0
    for name, shape in shapes(hops).items():
        size = int(np.prod(shape))
        parts[name] = theta[at : at + size].reshape(shape)
        at += size
    assert at == len(theta)
    return parts


def own_graph(nb: Any, cutoff: float) -> Graph:
    """All edges into owned atoms, found anew from the positions of all nodes, system by system."""
    from vesin import NeighborList

    x = nb.positions[: nb.n_nodes].detach().numpy()
    system = nb.node_system.numpy()
    receivers, senders, offsets = [], [], []
    for s in range(len(nb.cells)):
        rows = np.flatnonzero(system == s)
        if not len(rows):
            continue
        cell, pbc = nb.cells[s].numpy(), nb.pbc[s].numpy()
        finder = NeighborList(cutoff=cutoff, full_list=True, n_threads=1)
        pairs, shifts = finder.compute(x[rows], cell if pbc.any() else np.zeros((3, 3)), pbc, "PS")
        pairs = pairs.astype(np.int64)
        mine = rows[pairs[:, 0]] < nb.n_owned
        receivers.append(rows[pairs[mine, 0]])
        senders.append(rows[pairs[mine, 1]])
        offsets.append(shifts[mine].astype(np.float64) @ cell)

    def joined(parts: list[np.ndarray], empty: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate([empty, *parts]))

    nothing = np.zeros(0, dtype=np.int64)
    return Graph(joined(receivers, nothing), joined(senders, nothing), joined(offsets, np.zeros((0, 3))))


def system_virial(nb: Any, graph: Any, vectors: Tensor, by_vector: Tensor) -> Tensor:
    """-Σ over edges of r ⊗ dE/dr, per system, (systems, 3, 3): this rank's part."""
    products = (vectors.detach()[:, :, None] * by_vector[:, None, :]).reshape(-1, 9)
    systems = nb.node_system.long()[graph.receivers]
    out = torch.zeros((len(nb.cells), 9), dtype=torch.float64)
    return -out.index_add(0, systems, products).reshape(-1, 3, 3)

"""References for whole systems that use nothing of the project's: every pair of atoms in every image, then autograd.

Energies are functions of positions and cell; forces and stress are their derivatives by positions and by strain.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import message_passing as mp
import numpy as np
import torch
from torch import Tensor

Energies = Callable[[Tensor, Tensor], Tensor]


class Result(NamedTuple):
    """energies (n,), eV; forces (n, 3), eV/Å; virial -dE/d(strain) (3, 3), eV."""

    energies: Tensor
    forces: Tensor
    virial: Tensor


def evaluate(energies: Energies, positions: Any, cell: Any) -> Result:
    """`energies(positions, cell)` and its derivatives."""
    x = torch.as_tensor(positions, dtype=torch.float64).clone().requires_grad_(True)
    h = torch.as_tensor(cell, dtype=torch.float64)
    strain = torch.zeros((3, 3), dtype=torch.float64, requires_grad=True)
    e = energies(x + x @ strain, h + h @ strain)
    by_x, by_strain = torch.autograd.grad(e.sum(), [x, strain])
    return Result(e.detach(), -by_x, -by_strain)


def bonds(positions: Tensor, cell: Tensor, pbc: Any, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
    """i, j (E,) and vectors (E, 3) from i to j of all pairs within the cutoff, by looking at every image."""
    x, h = positions.detach().numpy(), cell.detach().numpy()
    pbc = np.asarray(pbc, dtype=bool)
    spread = np.zeros(3, dtype=int)
    if pbc.any():
        # |s| <= (cutoff + largest distance between atoms) / distance between lattice planes, along periodic axes.
        full = h.copy()
        full[~pbc] = np.linalg.svd(h[pbc])[2][pbc.sum() :]
        planes = 1.0 / np.linalg.norm(np.linalg.inv(full), axis=0)
        extent = np.ptp(x @ np.linalg.inv(full), axis=0)
        spread = np.where(pbc, np.ceil(cutoff / planes + extent), 0).astype(int)
    found = []
    for shift in itertools.product(*(range(-n, n + 1) for n in spread)):
        d = np.linalg.norm(x[None, :, :] + np.array(shift) @ h - x[:, None, :], axis=2)
        near = d < cutoff
        if shift == (0, 0, 0):
            np.fill_diagonal(near, False)
        i, j = np.nonzero(near)
        found.append(np.concatenate([np.stack([i, j], axis=1), np.tile(shift, (len(i), 1))], axis=1))
    table = torch.from_numpy(np.concatenate(found))
    i, j = table[:, 0], table[:, 1]
    return i, j, positions[j] + table[:, 2:].double() @ cell - positions[i]


def message_passing(model: Any, numbers: Any, pbc: Any, theta: Tensor | None = None) -> Energies:
    """Energies per atom of a `MessagePassing`; sums over neighbours are products with a dense matrix."""
    numbers = torch.as_tensor(np.asarray(numbers))
    theta = mp.weights(model.seed, model.hops) if theta is None else theta

    def energies(x: Tensor, cell: Tensor) -> Tensor:
        i, j, r = bonds(x, cell, pbc, model.cutoff)
        d = torch.linalg.norm(r, dim=1)
        u = r / d[:, None]
        into = torch.nn.functional.one_hot(i, len(x)).double().T
        part = mp.unpack(theta, model.hops)
        env = (1 - (d / model.cutoff) ** 2) ** 3
        centres = np.linspace(mp.NEAREST, model.cutoff, mp.BASIS)
        gauss = torch.stack([torch.exp(-(((d - c) / (centres[1] - centres[0])) ** 2)) for c in centres], dim=1)
        s = part["embedding"][torch.where(numbers == mp.SPECIES[1], 1, 0)]
        v = torch.zeros((len(x), mp.WIDTH, 3), dtype=torch.float64)
        for hop in range(model.hops):
            w = torch.einsum("e,ek,kf->ef", env, gauss, part[f"filters{hop}"]).reshape(-1, 4, mp.WIDTH)
            scalar = w[:, 0] * s[j] + w[:, 1] * torch.einsum("efx,ex->ef", v[j], u)
            vector = torch.einsum("ef,ef,ex->efx", w[:, 2], s[j], u) + torch.einsum("ef,efx->efx", w[:, 3], v[j])
            a = mp.MESSAGE_SCALE * torch.einsum("ie,ef->if", into, scalar)
            b = mp.MESSAGE_SCALE * torch.einsum("ie,efx->ifx", into, vector)
            square = torch.einsum("ifx,ifx->if", b, b)
            s, v = s + torch.tanh(a @ part[f"A{hop}"] + square @ part[f"B{hop}"]), v + b
        phi = mp.STRENGTH * torch.exp(-(d - mp.NEAREST) / mp.DECAY) * env
        return mp.ENERGY_SCALE * (s @ part["readout"]) + 0.5 * into @ phi

    return energies


def lennard_jones(model: Any, numbers: Any, pbc: Any) -> Energies:
    """Energies per atom of a `LennardJones`, half of each pair's to either; truncated as the model says."""
    from ase.data import chemical_symbols

    names = [chemical_symbols[int(n)] for n in np.asarray(numbers)]
    pairs = {(a, b): model.pair(a, b) for a in set(names) for b in set(names)}
    epsilon = torch.tensor([[pairs[a, b][0] for b in names] for a in names], dtype=torch.float64)
    sigma = torch.tensor([[pairs[a, b][1] for b in names] for a in names], dtype=torch.float64)

    def potential(d: Tensor, e: Tensor, s: Tensor) -> Tensor:
        return 4 * e * ((s / d) ** 12 - (s / d) ** 6)

    def energies(x: Tensor, cell: Tensor) -> Tensor:
        i, j, r = bonds(x, cell, pbc, model.cutoff)
        d = torch.linalg.norm(r, dim=1)
        u = potential(d, epsilon[i, j], sigma[i, j])
        if model.truncation == "shift":
            u = u - potential(torch.full_like(d, model.cutoff), epsilon[i, j], sigma[i, j])
        if model.truncation == "switch":
            c2, o2, d2 = model.cutoff**2, model.switch_onset**2, d**2
            fade = (c2 - d2) ** 2 * (c2 + 2 * d2 - 3 * o2) / (c2 - o2) ** 3
            u = u * torch.where(d2 < o2, torch.ones_like(d2), fade)
        return 0.5 * torch.nn.functional.one_hot(i, len(x)).double().T @ u

    return energies

"""Features of atoms across ranks, inside autograd: owners' values onto ghosts, and gradients on ghosts back home.

Written S for the spreading of owned rows onto the ghosts that are copies of them, the gradient of S is its adjoint
S^T, which adds what stands on ghosts to their owners; and the gradient of S^T is S. So both can be differentiated as
often as one likes, and the sum over ranks of a loss has the gradient it has on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .mesh import Mesh


class Features:
    """The feature exchange of one state of a rank's lists.

    Args:
        mesh: the ranks.
        n_owned: owned rows.
        send_rows: per peer, owned rows it has ghosts of, in the order it expects them; None for this rank.
        ghost_rows: per peer, rows of the ghosts that it owns, in the order it sends them; None for this rank.
    """

    def __init__(
        self, mesh: Mesh, n_owned: int, send_rows: Sequence[Tensor | None], ghost_rows: Sequence[Tensor | None]
    ) -> None:
        self.mesh, self.n_owned = mesh, n_owned
        self.send_rows, self.ghost_rows = send_rows, ghost_rows
        #: how often a model has asked, so that one can be told that it never did
        self.calls = 0

    def spread(self, features: Tensor) -> Tensor:
        """(n_nodes, ...): ghosts' rows become what their owners have. Collective, differentiable."""
        self.calls += 1
        return _Spread.apply(features, self)

    def fold(self, features: Tensor) -> Tensor:
        """(n_nodes, ...): what stands on ghosts is added to their owners' rows and taken from theirs. As `spread`."""
        return _Fold.apply(features, self)

    def _spread(self, features: Tensor) -> Tensor:
        out = torch.zeros_like(features)
        out[: self.n_owned] = features[: self.n_owned]
        for rows, values in self._swap(features, self.send_rows, self.ghost_rows):
            out[rows] = values
        return out

    def _fold(self, features: Tensor) -> Tensor:
        out = torch.zeros_like(features)
        out[: self.n_owned] = features[: self.n_owned]
        for rows, values in self._swap(features, self.ghost_rows, self.send_rows):
            # index_add_ walks its index in order on the CPU; an atom seen twice by a peer gets both.
            out.index_add_(0, rows, values)
        return out

    def _swap(
        self, features: Tensor, leaving: Sequence[Tensor | None], coming: Sequence[Tensor | None]
    ) -> list[tuple[Tensor, Tensor]]:
        """(rows, values) from every peer, in peer order."""
        out = [None if rows is None else features[rows].cpu().contiguous() for rows in leaving]
        shape = features.shape[1:]
        into = [None if r is None else torch.empty((len(r), *shape), dtype=features.dtype) for r in coming]
        self.mesh.swap(out, into)
        return [
            (rows, values.to(features.device))
            for rows, values in zip(coming, into, strict=True)
            if rows is not None and values is not None and len(rows)
        ]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, exchange: Features) -> Tensor:
        ctx.exchange = exchange
        return exchange._spread(features)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Fold.apply(grad, ctx.exchange), None


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, exchange: Features) -> Tensor:
        ctx.exchange = exchange
        return exchange._fold(features)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Spread.apply(grad, ctx.exchange), None


__all__ = ["Features"]

"""What a model sees in each strategy, against brute force over all atoms and images.

A model that only looks leaves each rank's neighbourhood on its desk. Rows are told by their positions: which atom of
the whole system they are, and in which cell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import dense
import numpy as np
import pytest
import torch
from parity import cases, shapes

import mattermill as mm
from mattermill.domain.models import Model, ModelOutput
from mattermill.stages.integrators.still import Still

CUTOFF, SKIN = 3.6, 0.4
REACH = CUTOFF + SKIN


class Desk(dict):
    """Where a model leaves what it saw."""


@dataclass(frozen=True)
class Looks(Model):
    """Computes nothing, and refreshes that."""

    pairs: str = "full"
    hops: int = 1
    refreshes: bool = False
    cutoff: float = CUTOFF
    dtype: torch.dtype = torch.float64
    desk: Desk = field(default_factory=Desk, hash=False, compare=False)

    @property
    def species(self):
        return frozenset({18, 36})

    def identity(self):
        return {"name": "test-looks"}

    def compute(self, nb: Any, *, energy: bool = True, stress: bool = True) -> ModelOutput:
        self.desk["nb"] = nb
        zero = nb.refresh(torch.zeros((nb.n_nodes, 3), dtype=torch.float64))
        return ModelOutput(zero, zero[: nb.n_owned, 0].clone(), torch.zeros((nb.n_systems, 3, 3), dtype=torch.float64))


def batch_of(names):
    return cases.with_fields({name: shapes.SHAPES[name](7.6) for name in names})


def look(mesh, model, names, look_at, strategy="auto", grid=None, skin=SKIN):
    """What `look_at(nb, mesh)` makes of a rank's neighbourhood."""
    kwargs = {"strategy": strategy, "skin": skin, "grid": grid, "split_atoms": 8}
    with mm.DomainParallel(model, Still(), mesh, **kwargs) as runner:
        runner.partition(batch_of(names) if runner.mesh.is_lead else None)
        return look_at(model.desk["nb"], runner.mesh)


def everything(nb, mesh):
    """As arrays."""
    seen = {
        name: getattr(nb, name).numpy().copy()
        for name in (
            "ptr",
            "system",
            "node_system",
            "numbers",
            "positions",
            "node",
            "first",
            "count",
            "neighbors",
            "boundary",
        )
    }
    seen |= {"n_owned": nb.n_owned, "n_nodes": nb.n_nodes, "n_total": nb.n_total, "split": nb.split}
    if nb.strategy in ("wide", "refresh"):
        edges = nb.edges()
        x = torch.as_tensor(nb.positions[: nb.n_nodes])
        seen |= {
            "receivers": edges.receivers.numpy(),
            "senders": edges.senders.numpy(),
            "vectors": edges.vectors(x).numpy(),
        }
    return seen


# --- which strategy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "strategy", "expected"),
    [
        (Looks(pairs="half"), "auto", "pairs"),
        (Looks(pairs="none", hops=3), "auto", "graph"),
        (Looks(hops=1, refreshes=True), "auto", "wide"),
        (Looks(hops=3, refreshes=True), "auto", "refresh"),
        (Looks(hops=3), "auto", "wide"),
        (Looks(hops=3, refreshes=True), "wide", "wide"),
        (Looks(hops=3, refreshes=True), "refresh", "refresh"),
        (Looks(pairs="none", hops=3), "graph", "graph"),
    ],
)
def test_the_strategy_follows_the_model(model, strategy, expected):
    assert look(None, model, ["few"], lambda nb, mesh: nb.strategy, strategy) == expected


@pytest.mark.parametrize("strategy", ["narrow", "refresh", "graph"])
def test_a_strategy_the_model_cannot_have_is_refused(strategy):
    with pytest.raises(ValueError, match="strategy"):
        mm.DomainParallel(Looks(hops=3), Still(), strategy=strategy)


# --- rows ------------------------------------------------------------------------------------------------------------


def identify(points, whole, cell, pbc):
    """(atom, three cells) of each point: whose image it is, from the reference positions of a whole system."""
    box = np.eye(3)
    box[pbc] = cell[pbc]
    free = np.flatnonzero(~pbc)
    if len(free):
        box[free] = np.linalg.svd(box[pbc])[2][pbc.sum() :] if pbc.any() else np.eye(3)
    inverse = np.linalg.inv(box)
    away = (points[:, None, :] - whole[None, :, :]) @ inverse
    cells = np.where(pbc, np.round(away), 0.0)
    distance = np.linalg.norm((away - cells) @ box, axis=2)
    atom = distance.argmin(axis=1)
    rows = np.arange(len(points))
    assert distance[rows, atom].max(initial=0.0) < 1e-9
    return [(int(a), *map(int, cells[r, a])) for r, a in zip(rows, atom, strict=True)]


def named_rows(seen, batch):
    """Of every row its (system, atom, cells); None for spare rows."""
    names: list[Any] = [None] * seen["n_total"]
    system_of = np.where(
        seen["node"] < seen["n_nodes"], seen["node_system"][np.minimum(seen["node"], seen["n_nodes"] - 1)], -1
    )
    spare = np.arange(seen["n_total"]) < seen["n_nodes"]
    spare &= np.concatenate([seen["node_system"], np.zeros(seen["n_total"] - seen["n_nodes"])]) < 0
    used = set(seen["neighbors"][_pair_places(seen)].tolist()) | set(range(seen["n_nodes"]))
    for s, one in enumerate(batch):
        rows = [r for r in sorted(used) if system_of[r] == s and not spare[r]]
        found = identify(seen["positions"][rows], one.positions.numpy(), one.cell[0].numpy(), one.pbc[0].numpy())
        for row, name in zip(rows, found, strict=True):
            names[row] = (s, *name)
    return names


def _pair_places(seen):
    return np.concatenate(
        [np.zeros(0, int), *(np.arange(f, f + c) for f, c in zip(seen["first"], seen["count"], strict=True))]
    ).astype(int)


def bonds(batch, reach):
    """All directed pairs: (system, i, j, cells of j relative to i), by brute force."""
    found = set()
    for s, one in enumerate(batch):
        cell, pbc = one.cell[0].numpy(), one.pbc[0].numpy()
        i, j, vectors = dense.bonds(one.positions, one.cell[0], pbc, reach)
        x = one.positions.numpy()
        names = [identify((x[a] + v)[None], x, cell, pbc)[0] for a, v in zip(i.tolist(), vectors.numpy(), strict=True)]
        assert [n[0] for n in names] == j.tolist()
        found |= {(s, a, *name) for a, name in zip(i.tolist(), names, strict=True)}
    return found


def relative(i, j):
    """The directed pair of two named rows."""
    assert i[0] == j[0]
    return (i[0], i[1], j[1], *(b - a for a, b in zip(i[2:], j[2:], strict=True)))


def listed(seen, names):
    """Directed pairs of a rank's list, in its order."""
    out = []
    for i in range(seen["n_nodes"]):
        for place in range(seen["first"][i], seen["first"][i] + seen["count"][i]):
            out.append(relative(names[i], names[seen["neighbors"][place]]))
    return out


LAYOUTS = [
    (["flake", "cubic", "few"], 2, (2, 1, 1)),
    (["cubic"], 8, (2, 2, 2)),
    (["triclinic", "chain"], 4, None),
    (["skewed"], 3, None),
    (["slab", "tiny"], 4, (2, 1, 2)),
    (["wire"], 8, (1, 1, 8)),
    (["cluster"], 4, (2, 2, 1)),
]
BY_LAYOUT = pytest.mark.parametrize(
    ("names", "size", "grid"), LAYOUTS, ids=[f"{'-'.join(names)}-{size}r" for names, size, _ in LAYOUTS]
)


@BY_LAYOUT
def test_half_lists_hold_each_pair_once_over_all_ranks(ranks, names, size, grid):
    batch = batch_of(names)
    results = ranks.run(look, size, Looks(pairs="half"), names, everything, grid=grid)
    pairs = [p for seen in results for p in listed(seen, named_rows(seen, batch))]
    both = [p for s, i, j, *c in pairs for p in ((s, i, j, *c), (s, j, i, *(-x for x in c)))]
    assert len(set(both)) == len(both), "a pair stands twice"
    assert set(both) == bonds(batch, REACH)
    assert any(seen["n_nodes"] > seen["n_owned"] for seen in results)


@pytest.mark.parametrize(("strategy", "hops"), [("wide", 1), ("wide", 2), ("refresh", 3)])
@BY_LAYOUT
def test_full_lists_hold_all_edges_into_receivers(ranks, names, size, grid, strategy, hops):
    batch = batch_of(names)
    model = Looks(hops=hops, refreshes=strategy == "refresh")
    results = ranks.run(look, size, model, names, everything, strategy=strategy, grid=grid)
    everywhere = bonds(batch, REACH)
    near = bonds(batch, CUTOFF)
    into: dict[tuple[int, int], set] = {}
    for edge in everywhere:
        into.setdefault(edge[:2], set()).add(edge)
    owned = 0
    for seen in results:
        rows = named_rows(seen, batch)
        here: dict[Any, list] = {}
        for place, edge in zip(_owners(seen), listed(seen, rows), strict=True):
            here.setdefault(rows[place], []).append(edge)
        for edges in here.values():
            assert len(set(edges)) == len(edges), "an edge stands twice"
        # Owned atoms have all their edges; so has whatever a message passes on its way to one.
        front = {rows[i] for i in range(seen["n_owned"])}
        owned += len(front)
        node_of = {row: rows[seen["node"][r]] for r, row in enumerate(rows) if row is not None}
        for hop in range(hops if strategy == "wide" else 1):
            for row in front:
                wanted = into.get(row[:2], set())
                have = set(here.get(row, []))
                assert (have == wanted) if hop == 0 else (have >= wanted & near)
            # An image along an axis that is not split is no node: the messages it sends are its node's.
            front = {node_of[_moved(row, edge)] for row in front for edge in into.get(row[:2], set()) & near}
        if strategy == "refresh":
            assert not seen["count"][seen["n_owned"] :].any()
    assert owned == batch.n_atoms


def _owners(seen):
    return np.repeat(np.arange(seen["n_nodes"]), seen["count"])


def _moved(row, edge):
    """The named row at the other end of an edge."""
    return (edge[0], edge[2], *(a + b for a, b in zip(row[2:], edge[3:], strict=True)))


@BY_LAYOUT
def test_edges_are_the_list(ranks, names, size, grid):
    """Nodes at both ends, and the vectors from one row to the other."""
    for seen in ranks.run(look, size, Looks(hops=2), names, everything, grid=grid):
        i, j = _owners(seen), seen["neighbors"][_pair_places(seen)]
        order = np.lexsort((seen["vectors"][:, 2], seen["vectors"][:, 1], seen["vectors"][:, 0], seen["receivers"]))
        vectors = seen["positions"][j] - seen["positions"][i]
        other = np.lexsort((vectors[:, 2], vectors[:, 1], vectors[:, 0], i))
        assert np.array_equal(seen["receivers"][order], i[other])
        assert np.array_equal(seen["senders"][order], seen["node"][j][other])
        assert np.abs(seen["vectors"][order] - vectors[other]).max(initial=0.0) < 1e-12


@BY_LAYOUT
def test_boundary_marks_atoms_that_see_remote_ghosts(ranks, names, size, grid):
    for seen in ranks.run(look, size, Looks(pairs="half"), names, everything, grid=grid):
        far = seen["node"][seen["neighbors"][_pair_places(seen)]] >= seen["n_owned"]
        expected = np.zeros(seen["n_nodes"], dtype=np.uint8)
        np.maximum.at(expected, _owners(seen)[far], 1)
        assert np.array_equal(seen["boundary"], expected[: seen["n_owned"]])
        assert seen["split"]
    alone = look(None, Looks(pairs="half"), names, everything)
    assert not alone["split"]
    assert not alone["boundary"].any()


@BY_LAYOUT
def test_graph_partition_holds_every_atom_unshifted(ranks, names, size, grid):
    batch = batch_of(names)
    results = ranks.run(look, size, Looks(pairs="none", hops=2), names, everything, grid=grid)
    counted = np.zeros(len(batch), dtype=int)
    for seen in results:
        rows = [r for r in named_rows(seen, batch)[: seen["n_nodes"]] if r is not None]
        assert len({r[:2] for r in rows}) == len(rows), "an atom stands twice"
        counted += np.bincount(seen["system"], minlength=len(batch))
        for s in range(len(batch)):
            here = sum(r[0] == s for r in rows)
            assert here in (0, batch.counts[s])
            # Replicated or absent: a rank that owns none of a system needs none of it.
            assert (here > 0) or not (seen["system"] == s).any()
    assert np.array_equal(counted, batch.counts)


# --- refresh ---------------------------------------------------------------------------------------------------------


def signature(nb):
    """Of each node something that all images of an atom have in common, from its own row: (n_nodes, 4)."""
    x = nb.positions[: nb.n_nodes]
    out = torch.full((nb.n_nodes, 4), torch.nan, dtype=torch.float64)
    for s in range(nb.n_systems):
        rows = nb.node_system == s
        pbc = nb.pbc[s]
        cell = torch.where(pbc[:, None], nb.cells[s], torch.eye(3, dtype=torch.float64))
        fractional = x[rows] @ torch.linalg.inv(cell)
        out[rows, :3] = torch.where(pbc, torch.cos(2 * torch.pi * fractional + 0.3), fractional)
        out[rows, 3] = nb.numbers[: nb.n_nodes][rows].double()
    return out


def refreshed(nb, mesh):
    """Features of several shapes and dtypes, unknown on ghosts, and what they should be."""
    used = (nb.node_system >= 0).numpy()
    want = signature(nb)
    blank = want.clone()
    blank[nb.n_owned :] = torch.nan
    before = mesh.messages
    got = nb.refresh(blank)
    messages = mesh.messages - before
    assert torch.equal(torch.nan_to_num(blank[: nb.n_owned]), torch.nan_to_num(want[: nb.n_owned])), "input changed"
    other = nb.refresh(blank.float().reshape(-1, 2, 2))
    single = nb.refresh(blank[:, 3])
    assert other.dtype == torch.float32
    assert other.shape == (nb.n_nodes, 2, 2)
    assert torch.equal(torch.nan_to_num(other.reshape(-1, 4)), torch.nan_to_num(got.float()))
    assert torch.equal(torch.nan_to_num(single), torch.nan_to_num(got[:, 3]))
    return got.numpy()[used], want.numpy()[used], messages, nb.n_owned


STRATEGIES = [(Looks(hops=2, refreshes=True), "refresh"), (Looks(pairs="none", hops=2), "graph")]


@pytest.mark.parametrize(("model", "strategy"), STRATEGIES, ids=["refresh", "graph"])
@BY_LAYOUT
def test_ghosts_get_their_owners_features(ranks, names, size, grid, model, strategy):
    results = ranks.run(look, size, model, names, refreshed, strategy=strategy, grid=grid)
    for got, want, messages, _ in results:
        assert np.abs(got - want).max(initial=0.0) < 1e-9
        assert messages <= size - 1, "more than one message per peer"
    assert any(len(got) > n_owned for got, _, _, n_owned in results)


def narrow(nb, mesh):
    """By dtype, whether ghosts got exactly their owners' values, in that dtype."""
    used, owned = nb.node_system >= 0, nb.n_owned
    exact = nb.refresh(signature(nb))
    right = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        blank = exact.to(dtype)
        blank[owned:] = 7.0
        got = nb.refresh(blank)
        right[str(dtype)] = got.dtype == dtype and torch.equal(got[used], exact.to(dtype)[used])
    return right, int(used.sum()) - owned


@pytest.mark.parametrize("wire", ["gloo", "local"])
def test_features_of_every_floating_type_cross_every_wire(ranks, wire):
    model, strategy = STRATEGIES[0]
    for right, n_ghosts in ranks.run(look, 2, model, ["cubic"], narrow, strategy=strategy, grid=(2, 1, 1), wire=wire):
        assert n_ghosts > 0
        assert right == dict.fromkeys(("torch.bfloat16", "torch.float16", "torch.float32"), True)


def products(nb, mesh):
    """<refresh(a), b> and <a, adjoint(b)> over all ranks; the same for the adjoint's own adjoint."""
    rng = torch.Generator().manual_seed(11 + mesh.rank)

    def noise():
        # Spare rows are nobody's.
        value = torch.randn((nb.n_nodes, 3), generator=rng, dtype=torch.float64)
        value[nb.node_system < 0] = 0.0
        return value

    a, b, c = noise().requires_grad_(True), noise().requires_grad_(True), noise()
    forward = nb.refresh(a)
    (back,) = torch.autograd.grad((forward * b).sum(), a, create_graph=True)
    (again,) = torch.autograd.grad((back * c).sum(), b)
    pairs = [(forward * b).sum(), (a * back).sum(), (back * c).sum(), (b * again).sum()]
    ghosts = back[nb.n_owned :].abs().max() if nb.n_nodes > nb.n_owned else torch.zeros(())
    return mesh.sum(torch.stack(pairs).detach()).tolist(), float(ghosts)


@pytest.mark.parametrize(("model", "strategy"), STRATEGIES, ids=["refresh", "graph"])
@BY_LAYOUT
def test_the_adjoint_brings_gradients_home(ranks, names, size, grid, model, strategy):
    for (one, two, three, four), ghosts in ranks.run(look, size, model, names, products, strategy=strategy, grid=grid):
        assert one == pytest.approx(two, rel=1e-12)
        assert three == pytest.approx(four, rel=1e-12)
        # What stood on a ghost was overwritten: nothing depends on it.
        assert ghosts == 0.0


def untouched(nb, mesh):
    x = torch.randn((nb.n_nodes, 2), dtype=torch.float64)
    before = mesh.messages
    return torch.equal(nb.refresh(x), x) and mesh.messages == before


def test_nothing_to_refresh(ranks):
    """In the wide strategy, and on one rank."""
    assert all(ranks.run(look, 2, Looks(hops=2), ["cubic"], untouched))
    for model, strategy in STRATEGIES:
        assert look(None, model, ["cubic"], untouched, strategy)

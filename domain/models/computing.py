"""One computation of a model in its three phases, and what is said of a model that does not keep to them."""

from __future__ import annotations

from ..neighborhood import Neighborhood
from .base import Model, ModelError, ModelOutput


class Computing:
    """A model at work on a neighbourhood: the first phase is done when this is made.

    Args:
        folds: whether the runner takes forces on ghosts home, so that they must be given for every node.

    Raises:
        ModelError: phases that yield too rarely or too often, or an output that is not what `ModelOutput` says.
    """

    def __init__(self, model: Model, nb: Neighborhood, folds: bool, *, energy: bool, stress: bool) -> None:
        self.name, self.nb, self.folds, self.energy, self.stress = type(model).__name__, nb, folds, energy, stress
        self.hops = model.hops
        self._phases = model.phases(nb, energy=energy, stress=stress)
        self._middle: ModelOutput | None = None
        self._calls = 0 if nb.features is None else nb.features.calls
        try:
            next(self._phases)
        except StopIteration:
            raise self._error("never yields: the first `yield None` comes before ghosts are looked at") from None

    def middle(self) -> ModelOutput:
        """The second phase: what stands on ghosts is final."""
        try:
            out = next(self._phases)
        except StopIteration:
            raise self._error("yields once: the second yield hands out the output, ghosts' rows being final") from None
        if not isinstance(out, ModelOutput):
            raise self._error(f"hands out {type(out).__name__} at the second yield: it must be a ModelOutput")
        rows = self.nb.n_nodes if self.folds else self.nb.n_owned
        if tuple(out.forces.shape) != (rows, 3):
            kind = "nodes (owned atoms and ghosts)" if self.folds else "owned atoms"
            raise self._error(
                f"gives forces of shape {tuple(out.forces.shape)}, for {rows} {kind}: make it ({rows}, 3)"
            )
        self._middle = out
        return out

    def end(self) -> ModelOutput:
        """The last phase: everything is final."""
        try:
            next(self._phases)
        except StopIteration as stop:
            out = stop.value
        else:
            raise self._error("yields more than twice: it must return its output after the second yield")
        if not isinstance(out, ModelOutput):
            raise self._error(f"returns {type(out).__name__}: it must return a ModelOutput")
        if self._middle is not None and out.forces is not self._middle.forces:
            raise self._error("returns other forces than it handed out at the second yield: go on with those tensors")
        features = self.nb.features
        if self.hops > 1 and features is not None and features.calls == self._calls:
            raise self._error("has never called nb.refresh, as it must before every layer but the first")
        if self.energy and out.energies is None:
            raise self._error("gives no energies though they were asked for")
        if self.stress and out.virial is None:
            raise self._error("gives no virial though the stress was asked for")
        return out

    def close(self) -> None:
        """Not needed after all: lists were used up."""
        self._phases.close()

    def _error(self, what: str) -> ModelError:
        return ModelError(f"model {self.name} {what}; see mattermill.domain.models.base.Model.phases")


__all__ = ["Computing"]

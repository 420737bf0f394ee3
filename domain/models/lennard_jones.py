"""The Lennard-Jones potential of several species."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..neighborhood import Neighborhood
from .base import Model, ModelOutput, Pairs, Phases, drained

Truncation = Literal["plain", "shift", "switch"]
Key = str | tuple[str, str]

_DTYPES = {"float64": torch.float64, "float32": torch.float32}
_N_SYMBOLS = 119


@dataclass(frozen=True, eq=True, kw_only=True)
class LennardJones(Model):
    """U(r) = 4 ε ((σ/r)¹² - (σ/r)⁶) below the cutoff, for any number of species.

    Args:
        epsilon: well depth ε by chemical symbol, eV: ``{"Ar": 0.0104, "Kr": 0.0140}``. A pair of species may be given
            its own: ``{..., ("Ar", "Kr"): 0.0121}`` (in either order); else it is mixed, ε = √(ε₁ ε₂) (Berthelot).
        sigma: distance σ at which U is zero, Å, by the same keys; mixed as σ = (σ₁ + σ₂) / 2 (Lorentz).
        cutoff: Å, the same for all pairs.
        truncation: how U ends at the cutoff rc.
            ``"plain"``: U jumps to zero. ``"shift"``: U - U(rc), forces still jump.
            ``"switch"``: U(r) s(r) with s = 1 below the onset ro and, from there to rc,
            s = (rc² - r²)² (rc² + 2 r² - 3 ro²) / (rc² - ro²)³, so that energy and forces are continuous. This is the
            switch of Brooks et al., J. Comput. Chem. 4, 187 (1983) (CHARMM), also of ASE's LennardJones(smooth=True).
        switch_onset: ro, Å, for "switch" only; default 0.8 cutoff.
        dtype: of the pair arithmetic, torch.float64 or torch.float32. Differences of positions are always taken, and
            forces, energies and virials always added up, in float64.

    Raises:
        ValueError: parameters that make no potential; the message says which.
    """

    epsilon: Mapping[Any, float]  # keys are `Key`s; a Mapping's key type is invariant
    sigma: Mapping[Any, float]
    cutoff: float
    truncation: Truncation = "switch"
    switch_onset: float | None = None
    dtype: torch.dtype = torch.float64
    pairs: ClassVar[Pairs] = "half"  # type: ignore[misc]

    def __post_init__(self) -> None:
        epsilon = _canonical("epsilon", self.epsilon, zero_allowed=True)
        sigma = _canonical("sigma", self.sigma, zero_allowed=False)
        species, other = _symbols(epsilon), _symbols(sigma)
        if species != other:
            raise ValueError(
                f"epsilon and sigma must name the same species, got {', '.join(species)} and {', '.join(other)}"
            )
        if not (math.isfinite(self.cutoff) and self.cutoff > 0):
            raise ValueError(f"cutoff must be positive, in Å, got {self.cutoff}")
        if self.truncation not in get_args(Truncation):
            raise ValueError(f"truncation must be one of {', '.join(get_args(Truncation))}, got {self.truncation!r}")
        if self.dtype not in _DTYPES.values():
            raise ValueError(f"dtype must be torch.float64 or torch.float32, got {self.dtype!r}")
        self._set("epsilon", epsilon)
        self._set("sigma", sigma)
        self._set("cutoff", float(self.cutoff))
        self._set("switch_onset", self._onset())
        self._set("_tables", {})

    def _onset(self) -> float | None:
        if self.truncation != "switch":
            if self.switch_onset is not None:
                raise ValueError(f"switch_onset is for truncation='switch' only, not {self.truncation!r}: leave it out")
            return None
        onset = 0.8 * self.cutoff if self.switch_onset is None else float(self.switch_onset)
        if not 0 < onset < self.cutoff:
            raise ValueError(f"switch_onset must lie between 0 and the cutoff, {self.cutoff} Å, got {onset}")
        return onset

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # only while the frozen instance is made

    def __hash__(self) -> int:
        return hash((tuple(self.epsilon.items()), tuple(self.sigma.items()), self.cutoff, self.truncation))

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self._set(name, value)
        self._set("_tables", {})

    # --- what it is ------------------------------------------------------------------------------------------

    @property
    def symbols(self) -> tuple[str, ...]:
        """The species, by atomic number."""
        return _symbols(self.epsilon)

    @property
    def species(self) -> frozenset[int]:
        return frozenset(_number(symbol) for symbol in self.symbols)

    def pair(self, first: str, second: str) -> tuple[float, float]:
        """(ε, σ) of a pair of species, eV and Å: as given, else mixed."""
        a, b = sorted((first, second), key=_number)
        if a == b:
            return self.epsilon[a], self.sigma[a]
        epsilon, sigma = self.epsilon.get((a, b)), self.sigma.get((a, b))
        return (
            math.sqrt(self.epsilon[a] * self.epsilon[b]) if epsilon is None else epsilon,
            0.5 * (self.sigma[a] + self.sigma[b]) if sigma is None else sigma,
        )

    def identity(self) -> dict[str, Any]:
        """JSON-able; `from_identity` makes an equal model of it."""
        return {
            "name": "LennardJones",
            "version": 1,
            "epsilon": {_text(key): value for key, value in self.epsilon.items()},
            "sigma": {_text(key): value for key, value in self.sigma.items()},
            "cutoff": self.cutoff,
            "truncation": self.truncation,
            "switch_onset": self.switch_onset,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any]) -> LennardJones:
        """The model with this `identity`; ValueError if it is another model's or a later version's."""
        name, version = identity.get("name"), identity.get("version")
        if name != "LennardJones" or version != 1:
            raise ValueError(f"this is LennardJones version 1, not {name} version {version}")
        return cls(
            epsilon=identity["epsilon"],
            sigma=identity["sigma"],
            cutoff=identity["cutoff"],
            truncation=identity["truncation"],
            switch_onset=identity["switch_onset"],
            dtype=_DTYPES[identity["dtype"]],
        )

    # --- what it does ----------------------------------------------------------------------------------------

    def compute(self, nb: Neighborhood, *, energy: bool = True, stress: bool = True) -> ModelOutput:
        """Forces, and where asked for energies and virial; see `Model.compute`.

        Raises:
            ValueError: an owned atom is of a species the model does not know.
        """
        return drained(self.phases(nb, energy=energy, stress=stress))

    def phases(self, nb: Neighborhood, *, energy: bool = True, stress: bool = True) -> Phases:
        """See `Model.phases`: first atoms that see no remote ghost, then those that do, both over the whole rank."""
        from ..kernels import segment_sum

        tables = self._tables_on(nb.positions.device)
        full = energy or stress
        forces = nb.positions.new_zeros((nb.n_nodes, 3))
        energies = nb.positions.new_zeros(nb.n_nodes) if full else None
        virials = nb.positions.new_zeros((nb.n_owned, 6)) if full else None
        out = ModelOutput(forces, energies if energy else None)
        self._launch(nb, tables, 0 if nb.split else -1, forces, energies, virials)
        yield None
        if nb.split:
            self._launch(nb, tables, 1, forces, energies, virials)
        yield out
        if virials is not None and stress:
            out.virial = segment_sum(virials, nb.ptr)[:, tables.symmetric].reshape(-1, 3, 3)
        return out

    def _launch(
        self,
        nb: Neighborhood,
        tables: Tables,
        part: int,
        forces: Tensor,
        energies: Tensor | None,
        virials: Tensor | None,
    ) -> None:
        from ..kernels import launch
        from .lj_kernels import pair_kernel

        type, uniform = self._types(nb, tables)
        launch(
            pair_kernel(self.dtype, self.truncation == "switch", energies is not None), nb.n_owned, nb.positions,
            nb.node, nb.first, nb.count, nb.neighbors, nb.boundary, part, type, uniform, tables.coefficients,
            tables.types, tables.rc2, tables.inv_width, forces, energies, virials,
        )  # fmt: skip

    def _tables_on(self, device: torch.device) -> Tables:
        cache: dict[torch.device, Tables] = self._tables  # type: ignore[attr-defined]
        if device not in cache:
            cache[device] = Tables.of(self, device)
        return cache[device]

    def _types(self, nb: Neighborhood, tables: Tables) -> tuple[Tensor, int]:
        """Type of every row, int32 (n_total,), and 1 if it is the same for all, else 0.

        Once per content of `nb.numbers`: an in-place change of a tensor counts up its version.
        """
        stamp = (id(self), nb.numbers.data_ptr(), nb.numbers._version, nb.n_owned)
        kept = nb.cache.get("lennard_jones.types")
        if kept is not None and kept[0] == stamp:
            return kept[1:]
        numbers = nb.numbers
        inside = (numbers >= 0) & (numbers < _N_SYMBOLS)
        type = torch.where(inside, tables.type_of[numbers.clamp(0, _N_SYMBOLS - 1).long()], tables.types - 1)
        known = type[: nb.n_owned] < tables.types - 1
        if not bool(known.all()):
            unknown = ", ".join(self.unknown_species(numbers[: nb.n_owned][~known].unique().tolist()))
            raise ValueError(f"the model knows {', '.join(self.symbols)}, not {unknown}: give it epsilon and sigma")
        uniform = int(bool((type == type[:1]).all()))
        nb.cache["lennard_jones.types"] = (stamp, type, uniform)
        return type, uniform


@dataclass(frozen=True)
class Tables:
    """A model's parameters as the kernels read them, on one device.

    Attributes:
        type_of: int32, (119,): type of each atomic number; ``types - 1`` for those the model does not know.
        coefficients: model dtype, (types², 3): 4 ε σ¹², 4 ε σ⁶, U(rc) (0 unless shifted); NaN for unknown species, so
            that one can never pass for another.
        types: number of species, and one for the unknown.
        rc2, inv_width: rc² and 1 / (rc² - ro²), Å.
        symmetric: where xx xy xz yx ... stand among xx yy zz yz xz xy.
    """

    type_of: Tensor
    coefficients: Tensor
    types: int
    rc2: float
    inv_width: float
    symmetric: Tensor

    @classmethod
    def of(cls, model: LennardJones, device: torch.device) -> Tables:
        symbols = model.symbols
        types = len(symbols) + 1
        type_of = np.full(_N_SYMBOLS, types - 1, dtype=np.int32)
        rows = np.full((types, types, 3), np.nan)
        for a, first in enumerate(symbols):
            type_of[_number(first)] = a
            for b, second in enumerate(symbols):
                epsilon, sigma = model.pair(first, second)
                c12, c6 = 4.0 * epsilon * sigma**12, 4.0 * epsilon * sigma**6
                shift = c12 / model.cutoff**12 - c6 / model.cutoff**6 if model.truncation == "shift" else 0.0
                rows[a, b] = c12, c6, shift
        onset = model.switch_onset
        return cls(
            type_of=torch.from_numpy(type_of).to(device),
            coefficients=torch.from_numpy(rows.reshape(-1, 3)).to(device=device, dtype=model.dtype),
            types=types,
            rc2=model.cutoff**2,
            inv_width=0.0 if onset is None else 1.0 / (model.cutoff**2 - onset**2),
            symmetric=torch.tensor([0, 5, 4, 5, 1, 3, 4, 3, 2], device=device),
        )


def _canonical(name: str, given: Mapping[Any, float], *, zero_allowed: bool) -> dict[Key, float]:
    """Validated values, species by atomic number first, then pairs, each pair's lighter species first."""
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"{name} must map chemical symbols to numbers, such as {{'Ar': 1.0}}, got {given!r}")
    values: dict[Key, float] = {}
    for key, number in given.items():
        value = float(number)
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero_allowed):
            raise ValueError(f"{name} of {_text(key)} must be positive, got {number}")
        canonical = _canonical_key(name, key)
        if values.setdefault(canonical, value) != value:
            raise ValueError(f"{name} of {_text(canonical)} is given twice, as {values[canonical]} and {value}")
    for key in values:
        for symbol in key if isinstance(key, tuple) else ():
            if symbol not in values:
                raise ValueError(f"{name} has the pair {_text(key)} but no value for {symbol} itself: add it")
    return dict(sorted(values.items(), key=_order))


def _canonical_key(name: str, key: Any) -> Key:
    parts = tuple(key.split("-")) if isinstance(key, str) else key
    if not isinstance(parts, tuple) or len(parts) not in (1, 2):
        raise ValueError(f"keys of {name} must be a symbol, such as 'Ar', or a pair, ('Ar', 'Kr'), got {key!r}")
    first, *rest = sorted(parts, key=_number)
    if not rest:
        return first
    return first if rest[0] == first else (first, rest[0])


def _order(item: tuple[Key, float]) -> tuple[int, ...]:
    key = item[0]
    return (1, _number(key), 0) if isinstance(key, str) else (2, *(_number(symbol) for symbol in key))


def _symbols(values: Mapping[Any, float]) -> tuple[str, ...]:
    return tuple(key for key in values if isinstance(key, str))


def _text(key: Any) -> str:
    return "-".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _number(symbol: Any) -> int:
    from ase.data import atomic_numbers

    number = atomic_numbers.get(symbol, 0) if isinstance(symbol, str) else 0
    if number <= 0:
        raise ValueError(f"{symbol!r} is not a chemical symbol")
    return number

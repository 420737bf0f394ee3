"""The recipe: a graph of stages with the model that drives them. A value, checked when it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..stages.graph import Part, Piece, piece
from .errors import RecipeError
from .filter import Filter
from .plan import Plan, check_filters, check_stages

if TYPE_CHECKING:
    import os

    from distributed import Client

    from ..domain.models.base import Model
    from .campaign import Campaign
    from .events import Event


@dataclass(frozen=True)
class Recipe:
    """What is done to every structure, and by which model.

    Args:
        name: of the recipe, for people.
        model: computes forces in every stage that does not bring its own.
        graph: stages and filters joined by ``>>``; a list fans out, and every system goes down every branch.
        seed: of all noise, a whole number from 0.

    Raises:
        RecipeError: a name used twice, a cycle, a stage reached by two ways, a filter in front, a stage without a
            model; the message says what to change.
    """

    name: str
    model: Model | None = None
    graph: Part = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise RecipeError(f"a recipe's first argument is its name, such as 'screen', not {self.name!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**63:
            raise RecipeError(f"seed must be a whole number from 0, is {self.seed!r}")
        if not isinstance(self.graph, Piece) and not self.graph and isinstance(self.graph, tuple | list):
            raise RecipeError(f"recipe {self.name!r} has no stages: give graph=mm.Relax() >> mm.Heat(...) and so on")
        try:
            object.__setattr__(self, "graph", piece(self.graph))
        except TypeError as error:
            raise RecipeError(str(error)) from None
        check_stages(self.plan, self.model)
        check_filters(self.plan)

    @cached_property
    def plan(self) -> Plan:
        """The checked graph."""
        assert isinstance(self.graph, Piece)
        return Plan.of(self.graph)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "plan"}

    def to_json(self) -> dict[str, Any]:
        """As ``recipe.json`` has it: stages, parameters, model. Functions and classes of the user's only by name."""
        from .recipe_json import encode_recipe

        return encode_recipe(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Recipe:
        """The recipe of a document of `to_json`; nothing that the document names is imported.

        Raises:
            RecipeError: it is none, or needs code of the user's: then load the recipe file and hand that recipe over.
        """
        from .recipe_json import decode_recipe

        return decode_recipe(document)

    # --- running -------------------------------------------------------------------------------------------

    def start(
        self,
        structures: Any,
        out: str | os.PathLike[str],
        *,
        client: Client | None = None,
        ranks: int | None = None,
        progress: bool | Callable[[Event], None] | None = False,
        **options: Any,
    ) -> Campaign:
        """Start a campaign and return at once. See `run` for the arguments; `Campaign.wait` waits for its end."""
        from .campaign import Campaign

        return Campaign.start(self, structures, out, client=client, ranks=ranks, progress=progress, **options)

    def run(
        self,
        structures: Any,
        out: str | os.PathLike[str],
        *,
        client: Client | None = None,
        ranks: int | None = None,
        progress: bool | Callable[[Event], None] | None = None,
        **options: Any,
    ) -> Campaign:
        """Run a campaign to its end, with progress.

        Args:
            structures: what `mattermill.read` gives, or anything that it reads: paths, patterns, ASE Atoms.
            out: the campaign's folder, such as ``"screen.mill"``; it must not hold one yet.
            client: of a Dask cluster whose workers have one thread each; by default a cluster of this machine's
                cores is started, and closed at the end.
            ranks: how many ranks to use at most; by default all.
            progress: None shows progress (bars on a terminal, seldom lines elsewhere), False nothing, or a function
                that is called with every event (`mattermill.pipeline.events`).
            options: of `mattermill.pipeline.options.Options`: `segment_seconds`, `checkpoint_seconds`,
                `max_failure_rate`, `max_atoms`, `strict`, `device`.

        Returns:
            The campaign, ended: `summary`, `trajectory(system, stage)`, `status()`.

        Raises:
            CampaignError: it cannot start or cannot go on; what it did can be resumed.
            FolderError: `out` holds a campaign already.
            KeyboardInterrupt: interrupted; everything can be resumed.
        """
        from .campaign import refuse_to_block

        refuse_to_block(client, "recipe.start(...)")
        campaign = self.start(structures, out, client=client, ranks=ranks, progress=progress, **options)
        return campaign.see_through()


__all__ = ["Filter", "Recipe", "RecipeError"]

"""The scribe: errors are told, never lost, and time series are durable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaigns import produce, recipe, systems

from mattermill.pipeline import scribe as module
from mattermill.pipeline.campaign import Campaign
from mattermill.pipeline.errors import CampaignError
from mattermill.pipeline.folder import Folder
from mattermill.pipeline.intake import begin, structures_of
from mattermill.pipeline.ledger import Finished
from mattermill.pipeline.options import Options
from mattermill.pipeline.orders import Report
from mattermill.pipeline.scribe import Scribe
from mattermill.pipeline.thermo import ThermoFile
from mattermill.stages.thermo import COLUMNS


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    made = recipe(produce())
    folder = Folder.create(tmp_path / "a.mill")
    return Campaign(made, folder, begin(folder, made, structures_of(systems(1))), folder.hold(), Options())


def report() -> Report:
    thermo: dict[str, Any] = {name: np.array([1.0]) for name in COLUMNS}
    return Report(1, thermo_ids=("ar-0",), thermo={**thermo, "system": np.array([0])})


def test_an_error_that_nobody_foresaw_is_logged_and_kept(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*arguments: Any) -> Any:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(ThermoFile, "append", bug)
    scribe = Scribe(campaign.folder, campaign._writer, every=30.0)
    scribe.thermo("produce", report())
    scribe.close()
    assert isinstance(scribe.trouble, KeyError)
    assert "a bug of ours" in caplog.text
    assert campaign.folder.summary.exists()
    campaign._close()


def test_a_campaign_tells_of_a_summary_that_could_not_be_written(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_summary", full)
    campaign._writer.record([Finished("ar-0", "produce", "finished")])
    with pytest.raises(CampaignError, match=r"the ledger is whole.*No space left.*mattermill resume"):
        campaign._launch((None, None), False).wait(30)


def test_time_series_are_made_durable(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    original = ThermoFile.sync

    def sync(self: ThermoFile) -> None:
        synced.append(self._records.path.name)
        original(self)

    monkeypatch.setattr(ThermoFile, "sync", sync)
    scribe = Scribe(campaign.folder, campaign._writer, every=30.0)
    scribe.thermo("produce", report())
    scribe.close()
    assert synced == ["produce.nc"]
    assert scribe.trouble is None
    campaign._close()

"""The doctor: what it finds here, and that it finds what is in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from mattermill.pipeline import doctor
from mattermill.pipeline.doctor import Check, Verdict


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_versions_are_those_installed() -> None:
    import torch

    checks = by_name(list(doctor.versions()))
    assert checks["packages"].verdict is Verdict.OK
    assert f"torch {torch.__version__}" in checks["packages"].detail


def test_a_missing_package_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("torch", "no-such-package"))
    bad = [check for check in doctor.versions() if check.verdict is Verdict.BAD]
    assert [check.detail for check in bad] == ["not installed: no-such-package; pip install mattermill brings them"]


def test_a_group_of_two_ranks_forms() -> None:
    check = doctor.two_ranks()
    assert check.verdict is Verdict.OK, check.detail
    assert "forms in" in check.detail


def test_a_rank_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that the ranks run does not exist: they end at once, and the check says so without waiting."""
    monkeypatch.setattr(doctor, "__name__", "mattermill.pipeline.no_such_module")
    check = doctor.two_ranks()
    assert check.verdict is Verdict.BAD
    assert "rank 0" in check.detail
    assert "no_such_module" in check.detail


def test_a_full_disk_is_in_the_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.disk(tmp_path).verdict is Verdict.OK
    monkeypatch.setattr(doctor, "LOW_DISK_GIB", 1e9)
    assert doctor.disk(tmp_path).verdict is Verdict.BAD


def test_file_system_is_tried_and_left_clean(tmp_path: Path) -> None:
    checks = by_name(list(doctor.file_system(tmp_path)))
    assert {"rename and sync", "SQLite", "hard links"} <= checks.keys()
    assert all(check.verdict is not Verdict.BAD for check in checks.values())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named() -> None:
    bad = [check for check in doctor.file_system(Path("/proc")) if check.verdict is Verdict.BAD]
    assert len(bad) == 1
    assert "/proc" in bad[0].detail


def test_the_nearest_existing_folder_serves(tmp_path: Path) -> None:
    assert doctor._existing(tmp_path / "not" / "there") == tmp_path


def test_no_scheduler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CONNECT_SECONDS", 1.0)
    checks = list(doctor.cluster("tcp://127.0.0.1:9", tmp_path))
    assert [check.verdict for check in checks] == [Verdict.BAD]
    assert "tcp://127.0.0.1:9" in checks[0].detail


def test_a_cluster_is_examined(tmp_path: Path, cluster: object) -> None:
    checks = by_name(list(doctor.cluster(cluster.scheduler_address, tmp_path)))  # type: ignore[attr-defined]
    assert checks["cluster"].detail.startswith("2 workers on 1 hosts")
    assert "worker threads" not in checks
    assert checks["worker versions"].verdict is Verdict.OK
    assert checks["shared folder"].verdict is Verdict.OK


def test_workers_of_several_threads_are_refused(tmp_path: Path) -> None:
    from distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster:
        checks = by_name(list(doctor.cluster(cluster.scheduler_address, tmp_path)))
    assert checks["worker threads"].verdict is Verdict.BAD
    assert "--nthreads 1" in checks["worker threads"].detail

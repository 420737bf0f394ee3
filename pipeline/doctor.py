"""``mattermill doctor``: can this machine, this folder and this cluster run a campaign? Each check says what to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from .filesystem import file_system_type, is_network_file_system

#: Seconds that a 2-rank group may take to form and answer, process start included.
GROUP_SECONDS = 60.0
#: Below this much free space a campaign of any size is likely to fill the disk.
LOW_DISK_GIB = 5.0
#: Seconds that a scheduler may take to answer.
CONNECT_SECONDS = 10.0
_PACKAGES = (
    *("mattermill", "torch", "warp-lang", "numpy", "ase", "nvalchemi-toolkit-ops"),
    *("dask", "distributed", "xarray", "netCDF4", "bokeh"),
)
_EXTRAS = ("matplotlib", "dask-cuda", "sevenn", "mace-torch", "chgnet", "dask-jobqueue")


class Verdict(StrEnum):
    """What a check found: fine, worth knowing, or in the way of a campaign."""

    OK = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    verdict: Verdict
    detail: str


def examine(folder: Path, scheduler: str | None = None) -> Iterator[Check]:
    """All checks, one after the other, each reported as soon as it is known.

    Args:
        folder: where a campaign would be written; need not exist yet.
        scheduler: address of a running Dask scheduler whose workers are checked too.
    """
    yield from versions()
    yield from devices()
    yield two_ranks()
    home = _existing(folder)
    yield disk(home)
    yield from file_system(home)
    if scheduler is not None:
        yield from cluster(scheduler, home)


def versions() -> Iterator[Check]:
    """Python and the packages that matter, as installed."""
    yield Check("python", Verdict.OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    missing = [name for name in _PACKAGES if _version(name) is None]
    found = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES if name not in missing)
    yield Check("packages", Verdict.OK, found)
    if missing:
        remedy = "pip install mattermill brings them"
        yield Check("packages", Verdict.BAD, f"not installed: {', '.join(missing)}; {remedy}")
    extras = ", ".join(f"{name} {_version(name) or 'not installed'}" for name in _EXTRAS)
    yield Check("optional", Verdict.OK, extras)


def devices() -> Iterator[Check]:
    """Cores, memory, GPUs, and how many ranks a local run would have."""
    import torch

    from .cluster import default_ranks

    cores = default_ranks()
    memory = psutil.virtual_memory()
    yield Check(
        "cpu", Verdict.OK, f"{cores} cores, {memory.total / 2**30:.0f} GiB ({memory.available / 2**30:.0f} free)"
    )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(gpus):
        properties = torch.cuda.get_device_properties(index)
        yield Check(f"gpu {index}", Verdict.OK, f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if not gpus:
        built = f"this torch ({torch.__version__}) is built for CUDA {torch.version.cuda}" if torch.version.cuda else ""
        yield Check("gpu", Verdict.NOTE, "none: ranks run on the CPU" + (f"; {built}" if built else ""))
    yield Check("ranks", Verdict.OK, f"{cores} in a local run: one per core, one thread each")


def two_ranks() -> Check:
    """Start two processes, join them to one mesh, add a number: what every stage on several ranks needs."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    ranks = []
    for rank in range(2):
        command = [sys.executable, "-m", __name__, str(store.port), str(rank)]
        ranks.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
    answers: list[str | tuple[float, ...]] = []
    for rank, process in enumerate(ranks):
        try:
            out, err = process.communicate(timeout=max(0.1, GROUP_SECONDS - (time.perf_counter() - start)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            out, err = "", f"no answer within {GROUP_SECONDS:.0f} s: is traffic on the loopback address blocked?"
        if process.returncode != 0:
            last = (err.strip() or f"exit status {process.returncode}").splitlines()[-1]
            answers.append(f"rank {rank}: {last}")
        else:
            answers.append(tuple(float(number) for number in out.split()))
    bad = [answer for answer in answers if isinstance(answer, str)]
    if bad:
        return Check("2-rank group", Verdict.BAD, "; ".join(bad))
    seconds = time.perf_counter() - start
    formed, trip, formed_gloo, trip_gloo = (max(column) * 1e3 for column in zip(*answers, strict=True))
    detail = (
        f"forms in {formed:.0f} ms, a sum takes {trip:.2f} ms; between hosts (gloo) {formed_gloo:.0f} ms "
        f"and {trip_gloo:.2f} ms; {seconds:.1f} s with process start"
    )
    return Check("2-rank group", Verdict.OK, detail)


def _join(port: int, rank: int) -> list[float]:
    """One of the two processes of `two_ranks`: seconds to form a group and per sum, on one host and over gloo."""
    import torch
    import torch.distributed as dist

    from ..domain.mesh import Mesh

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    value = torch.tensor([float(rank + 1)], dtype=torch.float64)
    repeats = 20
    seconds = []
    for wire in ("auto", "gloo"):
        start = time.perf_counter()
        mesh = Mesh.join(dist.PrefixStore(wire, store), rank, 2, "cpu", timeout=30.0, wire=wire)
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(repeats):
            total = mesh.sum(value)
        seconds.append((time.perf_counter() - start) / repeats)
        if float(total) != 3.0:
            raise RuntimeError(f"1 + 2 over two ranks is {float(total)}")
        mesh.barrier()
        mesh.close()
    return seconds


def disk(folder: Path) -> Check:
    """Free space where the campaign would be written."""
    free = shutil.disk_usage(folder).free / 2**30
    if free < LOW_DISK_GIB:
        return Check("disk", Verdict.BAD, f"{free:.1f} GiB free in {folder}: free some, or write elsewhere")
    return Check("disk", Verdict.OK, f"{free:.0f} GiB free in {folder}")


def file_system(folder: Path) -> Iterator[Check]:
    """Whether files here can be renamed in one step, synced, linked and used by SQLite."""
    kind = file_system_type(folder) or "unknown"
    if is_network_file_system(folder):
        yield Check("file system", Verdict.OK, f"{kind}, other hosts may see it too")
    else:
        remedy = "workers on other hosts need a shared one"
        yield Check("file system", Verdict.NOTE, f"{kind}, seen by this host only: {remedy}")
    try:
        with tempfile.TemporaryDirectory(prefix=".mattermill-doctor-", dir=folder) as name:
            for check, test in (("rename and sync", _rename), ("SQLite", _sqlite), ("hard links", _link)):
                yield _try(check, test, Path(name))
    except OSError as error:
        yield Check("file system", Verdict.BAD, f"cannot write in {folder}: {error.strerror}")


def _try(name: str, test: Callable[[Path], str], folder: Path) -> Check:
    try:
        return Check(name, Verdict.OK, test(folder))
    except (OSError, sqlite3.Error) as error:
        return Check(name, Verdict.BAD, f"{error}: use another folder for campaigns")


def _rename(folder: Path) -> str:
    old, new = folder / "old", folder / "new"
    new.write_text("old")
    start = time.perf_counter()
    with old.open("w") as file:
        file.write("new")
        file.flush()
        os.fsync(file.fileno())
    os.replace(old, new)
    seconds = time.perf_counter() - start
    if new.read_text() != "new":
        raise OSError("a renamed file shows its old content")
    return f"atomic, a synced write takes {seconds * 1e3:.1f} ms"


def _sqlite(folder: Path) -> str:
    path = folder / "test.sqlite"
    with sqlite3.connect(path, timeout=5) as writer:
        mode = writer.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        writer.execute("CREATE TABLE t (x)")
        writer.execute("INSERT INTO t VALUES (1)")
    reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)
    try:
        if reader.execute("SELECT x FROM t").fetchall() != [(1,)]:
            raise OSError("SQLite does not read back what it wrote")
    finally:
        reader.close()
        writer.close()
    return f"journal mode {mode}"


def _link(folder: Path) -> str:
    (folder / "a").write_text("")
    try:
        os.link(folder / "a", folder / "b")
    except OSError:
        return "none here: the lock of a campaign uses exclusive creation instead"
    return "yes"


def cluster(scheduler: str, folder: Path) -> Iterator[Check]:
    """A running Dask cluster: workers of one thread, the same versions everywhere, and a folder that all can see."""
    from distributed import Client

    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS)
    except (OSError, TimeoutError, ValueError) as error:
        yield Check("cluster", Verdict.BAD, f"no scheduler answers at {scheduler} ({error}): is it running?")
        return
    with client:
        workers = client.scheduler_info(n_workers=-1)["workers"]
        hosts = {worker["host"] for worker in workers.values()}
        found = f"{len(workers)} workers on {len(hosts)} hosts at {scheduler}"
        yield Check("cluster", Verdict.OK if workers else Verdict.BAD, found + ("" if workers else ": start some"))
        threads = sorted({worker["nthreads"] for worker in workers.values()})
        if threads not in ([1], []):
            detail = f"workers have {threads} threads: a rank needs 1, start them with `dask worker --nthreads 1`"
            yield Check("worker threads", Verdict.BAD, detail)
        yield _same_versions(client)
        yield _shared_folder(client, folder, len(workers))


def _same_versions(client: object) -> Check:
    try:
        client.get_versions(check=True)  # type: ignore[attr-defined]
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Check("worker versions", Verdict.BAD, "differ: " + " ".join(lines)[:300])
    return Check("worker versions", Verdict.OK, "the same on client, scheduler and workers")


def _shared_folder(client: object, folder: Path, n_workers: int) -> Check:
    """Write a file here and ask each worker whether it is there."""
    with tempfile.NamedTemporaryFile(prefix=".mattermill-doctor-", dir=folder) as file:
        seen = client.run(os.path.exists, str(Path(file.name).absolute()))  # type: ignore[attr-defined]
    blind = sorted(worker for worker, there in seen.items() if not there)
    if blind:
        remedy = "write campaigns to a folder that all workers share"
        return Check("shared folder", Verdict.BAD, f"{folder} is not seen by {', '.join(blind)}: {remedy}")
    return Check("shared folder", Verdict.OK, f"{folder} is seen by all {n_workers} workers")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.expanduser().absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(*_join(int(sys.argv[1]), int(sys.argv[2])))

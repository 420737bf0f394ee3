"""What kind of file system a path lies on."""

from __future__ import annotations

import os
from pathlib import Path

_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "afs",
    "9p",
    "glusterfs",
    "pvfs2",
}


def file_system_type(path: str | os.PathLike[str]) -> str:
    """The type that Linux names for the mount that holds this path (``ext4``, ``nfs4`` …); empty if unknown."""
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    real = os.path.realpath(path)
    best, kind = "", ""
    for line in mounts:
        _, point, type_ = line.split(" ")[:3]
        point = point.replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, type_
    return kind


def is_network_file_system(path: str | os.PathLike[str]) -> bool:
    """Whether other hosts may see this path too, so that what relies on shared memory must not be used."""
    kind = file_system_type(path)
    return kind in _NETWORK or (kind.startswith("fuse.") and kind != "fuse.overlayfs" and "sshfs" in kind)


__all__ = ["file_system_type", "is_network_file_system"]

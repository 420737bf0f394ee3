"""Warp: initialisation, cheap launches on torch tensors, and the kernels that everything shares.

Importing this module imports warp; so whoever wants `import mattermill` to stay light imports it inside functions.
One kernel source serves CPU and CUDA. On the CPU Warp runs a launch's threads in order on the calling thread, so
accumulation into shared elements has a fixed order there.

Writing a kernel: give its module ``wp.set_module_options({"enable_backward": False})`` (halves the compilation),
take (n, 3) float64 tensors as ``wp.array(dtype=wp.vec3d)``, and launch it with `launch`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
import warp as wp
from torch import Tensor

# Quiet before init: the banner and compilation messages would land in users' and Dask workers' logs.
wp.config.log_level = wp.LOG_WARNING
wp.init()
wp.set_module_options({"enable_backward": False})

_TORCH_OF = {
    wp.float64: torch.float64,
    wp.float32: torch.float32,
    wp.int64: torch.int64,
    wp.int32: torch.int32,
    wp.uint8: torch.uint8,
    wp.bool: torch.bool,
}

# Recorded launches, per thread: a launch writes its arguments into the record before it runs it.
_records = threading.local()


def launch(kernel: wp.Kernel, dim: int, *args: Any) -> None:
    """Run a Warp kernel of one dimension over torch tensors and numbers, on the device of the first tensor.

    As ``wp.launch`` but some times cheaper per call (about 10 µs on the CPU): the launch is recorded once per kernel
    and device, later calls only exchange what changed. A tensor for an array of vectors or matrices has these as its
    last dimensions. Tensors must be contiguous and of the kernel's dtype.

    Raises:
        TypeError: a tensor's dtype, shape or layout does not fit the kernel's argument.
    """
    if dim == 0:
        return
    device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
    cache: dict[Any, _Record] = _records.__dict__
    key = (id(kernel), device)
    record = cache.get(key)  # type: ignore[call-overload]
    if record is None:
        record = cache[key] = _Record(kernel, device)  # type: ignore[index]
    record.run(dim, args)


class _Record:
    """A recorded launch and the arguments it last ran with."""

    def __init__(self, kernel: wp.Kernel, device: torch.device) -> None:
        self.kernel = kernel  # kept alive: its id is the cache key
        self.device = device
        self.slots: list[_ArraySlot | _ValueSlot] = []
        defaults: list[Any] = []
        for index, arg in enumerate(kernel.adj.args):
            if isinstance(arg.type, wp.array):
                slot: _ArraySlot | _ValueSlot = _ArraySlot(f"{kernel.key}({arg.label})", arg.type)
                defaults.append(slot.value)
            else:
                slot = _ValueSlot(index)
                defaults.append(0 if not hasattr(arg.type, "_shape_") else arg.type())
            self.slots.append(slot)
        self.dim = 1
        self.command = wp.launch(kernel, dim=1, inputs=defaults, device=wp.device_from_torch(device), record_cmd=True)

    def run(self, dim: int, args: tuple[Any, ...]) -> None:
        if len(args) != len(self.slots):
            raise TypeError(f"kernel {self.kernel.key} takes {len(self.slots)} arguments, got {len(args)}")
        if dim != self.dim:
            self.command.set_dim(dim)
            self.dim = dim
        for slot, value in zip(self.slots, args, strict=True):
            slot.set(self.command, value)
        if self.device.type == "cuda":
            self.command.launch(stream=wp.stream_from_torch(torch.cuda.current_stream(self.device)))
        else:
            self.command.launch()


class _ArraySlot:
    """An array argument: its descriptor is written in place, only when another tensor comes."""

    def __init__(self, name: str, array_type: Any) -> None:
        self.name = name
        dtype = array_type.dtype
        self.inner: tuple[int, ...] = tuple(getattr(dtype, "_shape_", ()))
        scalar = getattr(dtype, "_wp_scalar_type_", dtype)
        self.torch_dtype = _TORCH_OF[scalar]
        self.ndim = array_type.ndim
        self.value = array_type.__ctype__()
        self.value.ndim = self.ndim
        self.last: tuple[Any, ...] = ()

    def set(self, command: wp.Launch, tensor: Tensor | None) -> None:
        now: tuple[Any, ...] = (0, ()) if tensor is None else (tensor.data_ptr(), tensor.shape)
        if now == self.last:
            return
        shape: tuple[int, ...] = (0,) * self.ndim
        if tensor is not None:
            outer = tensor.dim() - len(self.inner)
            if (
                tensor.dtype != self.torch_dtype
                or outer != self.ndim
                or tuple(tensor.shape[outer:]) != self.inner
                or not tensor.is_contiguous()
            ):
                raise TypeError(
                    f"{self.name} must be a contiguous {self.torch_dtype} tensor with {self.ndim} dimensions before "
                    f"{self.inner}, got {tensor.dtype} {tuple(tensor.shape)}, contiguous: {tensor.is_contiguous()}"
                )
            shape = tuple(tensor.shape[:outer])
        value = self.value
        value.data = now[0]
        stride = self.torch_dtype.itemsize
        for extent in self.inner:
            stride *= extent
        for axis in reversed(range(self.ndim)):
            value.shape[axis] = shape[axis]
            value.strides[axis] = stride
            stride *= shape[axis]
        self.last = now


class _ValueSlot:
    """A number, vector or matrix argument."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.last: Any = None

    def set(self, command: wp.Launch, value: Any) -> None:
        if self.last is None or value != self.last:
            command.set_param_at_index(self.index, value)
            self.last = value


@wp.kernel(enable_backward=False)
def _segment_sum(
    values: wp.array2d(dtype=wp.float64), ptr: wp.array(dtype=wp.int64), out: wp.array2d(dtype=wp.float64)
):  # type: ignore[valid-type]
    thread = wp.tid()
    columns = out.shape[1]
    segment = thread / columns
    column = thread - segment * columns
    total = wp.float64(0.0)
    for row in range(int(ptr[segment]), int(ptr[segment + 1])):
        total += values[row, column]
    out[segment, column] = total


def segment_sum(values: Tensor, ptr: Tensor) -> Tensor:
    """Sums over consecutive segments, each added up in order: the bits depend on nothing but the segment's rows.

    Args:
        values: float64, (n,) or (n, k).
        ptr: int64, (segments + 1,), on the same device: segment s is rows ptr[s]:ptr[s+1].

    Returns:
        float64, (segments,) or (segments, k); 0 for an empty segment.
    """
    table = values.contiguous().reshape(values.shape[0], -1) if values.shape[0] else values.new_zeros((0, 1))
    columns = 1
    for extent in values.shape[1:]:
        columns *= extent
    segments = ptr.shape[0] - 1
    out = torch.zeros((segments, columns), dtype=torch.float64, device=values.device)
    if values.shape[0]:
        launch(_segment_sum, segments * columns, table, ptr, out)
    return out.reshape(segments, *values.shape[1:])


@wp.kernel(enable_backward=False)
def _place_images(
    positions: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
    image: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
    source: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
    shift: wp.array(dtype=wp.vec3i),  # type: ignore[valid-type]
    system: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
    cells: wp.array(dtype=wp.mat33d),  # type: ignore[valid-type]
):
    k = wp.tid()
    s = shift[k]
    h = cells[system[k]]
    x = positions[source[k]]
    for axis in range(3):
        f = wp.float64(s[axis])
        x += wp.vec3d(f * h[axis, 0], f * h[axis, 1], f * h[axis, 2])
    positions[image[k]] = x


def place_images(
    positions: Tensor, image: Tensor, source: Tensor, shift: Tensor, system: Tensor, cells: Tensor
) -> None:
    """Write periodic images in place: positions[image] = positions[source] + shift @ cells[system].

    Args:
        positions: float64, (n, 3), Å; changed in place.
        image, source: int32, (m,), rows of `positions`; sources must not be images themselves.
        shift: int32, (m, 3), lattice vectors to add.
        system: int32, (m,), row of `cells` for each image.
        cells: float64, (systems, 3, 3), lattice vectors as rows.
    """
    launch(_place_images, image.shape[0], positions, image, source, shift, system, cells)


def warm(device: str = "cpu", modules: Iterable[str] = ()) -> None:
    """Compile (or load from Warp's cache on disk) every kernel of this package now, rather than at first use.

    Args:
        device: where the kernels will run, "cpu" or "cuda:0".
        modules: names of further Python modules with kernels, such as "mattermill.domain.rng".

    Compiling everything takes some seconds per module the first time on a machine, milliseconds later. Warp keeps its
    cache in ~/.cache/warp/<version>, or where WARP_CACHE_PATH says; several ranks may compile at once.
    """
    from importlib import import_module

    from .models.lj_kernels import all_pair_kernels

    for name in modules:
        import_module(name)
    wanted = [wp.get_module(name) for name in (__name__, *modules)]
    wanted += [kernel.module for kernel in all_pair_kernels()]
    wp.force_load(device, wanted)

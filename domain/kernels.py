"""Warp: initialisation, cheap launches on torch tensors, and the kernels that everything shares.

Importing this module imports warp; so whoever wants `import mattermill` to stay light imports it inside functions.
One kernel source serves CPU and CUDA. On the CPU Warp runs a launch's threads in order on the calling thread, so
accumulation into shared elements has a fixed order there.

Most kernels are written in Warp's Python. Where all atoms go through a few operations each step, that leaves a CPU
mostly idle: such a kernel is a native snippet, C++ for CPU and CUDA alike, over a stretch of rows (`over_rows`).

Writing a kernel: give its module ``wp.set_module_options({"enable_backward": False})`` (halves the compilation),
take (n, 3) float64 tensors as ``wp.array(dtype=wp.vec3d)``, and launch it with `launch`.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import warp as wp
from torch import Tensor


def _init() -> None:
    """Initialise Warp without its banner and compilation messages, which would land in every worker's log."""
    wp.config.log_level = wp.LOG_WARNING
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        # Without a driver Warp's native code says so on stderr, in every process; `doctor` is the place to report it.
        saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(sink, 2)
            wp.init()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            os.close(sink)
    else:
        wp.init()


_init()
wp.set_module_options({"enable_backward": False})

_TORCH_OF = {
    wp.float64: torch.float64,
    wp.float32: torch.float32,
    wp.int64: torch.int64,
    wp.int32: torch.int32,
    wp.uint8: torch.uint8,
    wp.bool: torch.bool,
}


class _Thread(threading.local):
    """Recorded launches, per thread: a launch writes its arguments into the record before it runs it."""

    def __init__(self) -> None:
        self.records: dict[int, _Records] = {}


_thread = _Thread()


def launch(kernel: wp.Kernel, dim: int, *args: Any) -> None:
    """Run a Warp kernel of one dimension over torch tensors and numbers, on the device of the first tensor.

    As ``wp.launch`` but many times cheaper per call (about 3 µs on the CPU): the launch is recorded once per kernel
    and device, later calls only exchange what changed. A tensor for an array of vectors or matrices has these as its
    last dimensions. Tensors must be contiguous and of the kernel's dtype; one that was here before is known again, and
    must not have been reshaped in place (`resize_`, `t_`) since.

    Raises:
        TypeError: a tensor's dtype, shape or layout does not fit the kernel's argument.
    """
    if dim == 0:
        return
    records = _thread.records.get(id(kernel))
    if records is None:
        records = _thread.records[id(kernel)] = _Records(kernel)
    records.of(args).run(dim, args)


#: Rows that a CPU takes at a time, see `over_rows`.
ROWS = 64


def over_rows(body: str) -> str:
    """A native function's snippet that goes through the rows from `begin` on: 64 on a CPU, one on a device.

    Args:
        body: C++ for rows `at` to `to - 1`, all of system `s`, so that what belongs to a system is no matter of each
            row and loops over them can be vectorised. The function takes `begin`, `n` (rows in all) and `system`
            (int32, ascending) among its arguments; the snippet has `rows`, the most that can come at a time.
    """
    return f"""
#if defined(__CUDA_ARCH__)
    const int rows = 1;
#else
    const int rows = {ROWS};
#endif
    const int end = begin + rows < n ? begin + rows : n;
    for (int at = begin, to; at < end; at = to) {{
        const int s = system.data[at];
        to = system.data[end - 1] == s ? end : at + 1;
        while (to < end && system.data[to] == s)
            ++to;
        {body}
    }}
"""


def launch_rows(kernel: wp.Kernel, n: int, *args: Any) -> None:
    """Launch a kernel whose threads take a stretch of rows each: its first arguments are rows per thread, and n."""
    on_cpu = next(a for a in args if isinstance(a, Tensor)).is_cpu
    rows = ROWS if on_cpu else 1
    launch(kernel, -(-n // rows), rows, n, *args)


class _Records:
    """A kernel's recorded launches, one per device."""

    def __init__(self, kernel: wp.Kernel) -> None:
        self.kernel = kernel  # kept alive: its id is the cache key
        self.first = next(k for k, arg in enumerate(kernel.adj.args) if isinstance(arg.type, wp.array))
        self.cpu: _Record | None = None
        self.others: dict[torch.device, _Record] = {}

    def of(self, args: tuple[Any, ...]) -> _Record:
        first = args[self.first] if len(args) > self.first else None
        if not isinstance(first, Tensor):
            first = next(a for a in args if isinstance(a, Tensor))
        if first.is_cpu:
            if self.cpu is None:
                self.cpu = _Record(self.kernel, first.device)
            return self.cpu
        record = self.others.get(first.device)
        if record is None:
            record = self.others[first.device] = _Record(self.kernel, first.device)
        return record


class _Record:
    """A recorded launch and the arguments it last ran with."""

    def __init__(self, kernel: wp.Kernel, device: torch.device) -> None:
        self.kernel, self.device = kernel, device
        slots: list[_ArraySlot | _ValueSlot] = []
        for index, arg in enumerate(kernel.adj.args):
            is_array = isinstance(arg.type, wp.array)
            slots.append(
                _ArraySlot(f"{kernel.key}({arg.label})", arg.type, device) if is_array else _ValueSlot(index, arg)
            )
        self.n_args = len(slots)
        self.arrays = [(index, slot) for index, slot in enumerate(slots) if isinstance(slot, _ArraySlot)]
        self.values = [(index, slot) for index, slot in enumerate(slots) if isinstance(slot, _ValueSlot)]
        self.dim = 1
        self.command = wp.launch(
            kernel,
            dim=1,
            inputs=[slot.value for slot in slots],
            device=wp.device_from_torch(device),
            record_cmd=True,
        )
        self.packed = self._pack(slots) if device.type == "cpu" and self.command.block_dim == 1 else None

    def _pack(self, slots: list[_ArraySlot | _ValueSlot]) -> ctypes.Structure:
        """The arguments as a CPU kernel reads them: as Launch.launch() packs them, but once and not at every call."""
        params = self.command.params[1:]
        names = [f"a{index}" for index in range(len(params))]
        types = [type(param) for param in params]
        packed = type("Packed", (ctypes.Structure,), {"_fields_": list(zip(names, types, strict=True))})()
        for name, slot, param in zip(names, slots, params, strict=True):
            setattr(packed, name, param)
            slot.live_in(packed, name)
        return packed

    def run(self, dim: int, args: tuple[Any, ...]) -> None:
        if len(args) != self.n_args:
            raise TypeError(f"kernel {self.kernel.key} takes {self.n_args} arguments, got {len(args)}")
        command = self.command
        if dim != self.dim:
            command.set_dim(dim)
            self.dim = dim
        for index, slot in self.arrays:
            tensor = args[index]
            # The very tensor that was here before, with its memory where it was: nothing can have changed.
            if slot.known() is not tensor or tensor is None or tensor.data_ptr() != slot.pointer:
                slot.set(tensor)
        for index, number in self.values:
            value = args[index]
            # Only numbers can be compared with what they were: vectors are mutable.
            if not isinstance(value, (int, float)) or value != number.last:
                number.set(command, value)
        if self.packed is not None:
            command.hooks.forward(ctypes.byref(command.bounds), ctypes.byref(self.packed))
        else:
            command.launch(stream=wp.stream_from_torch(torch.cuda.current_stream(self.device)))


def _nothing() -> None:
    """As a weak reference to what is gone."""


class _ArraySlot:
    """An array argument: its descriptor is written in place, only when another tensor comes."""

    def __init__(self, name: str, array_type: Any, device: torch.device) -> None:
        self.name = name
        self.device = device
        dtype = array_type.dtype
        self.inner: tuple[int, ...] = tuple(getattr(dtype, "_shape_", ()))
        self.dtype = _TORCH_OF[getattr(dtype, "_wp_scalar_type_", dtype)]
        self.ndim = array_type.ndim
        self.value = array_type.__ctype__()
        self.value.ndim = self.ndim
        self.pointer = 0
        self.shape: tuple[int, ...] = ()
        # A weak reference: a record must not keep a system's tensors in memory.
        self.known: Callable[[], Tensor | None] = _nothing

    def live_in(self, packed: ctypes.Structure, name: str) -> None:
        self.value = getattr(packed, name)  # a view: ctypes hands out nested structures by reference

    def set(self, tensor: Tensor | None) -> None:
        if tensor is None:
            if self.pointer:
                self._describe(0, (0,) * self.ndim)
                self.known = _nothing
            return
        shape = tuple(tensor.shape)
        outer = len(shape) - len(self.inner)
        if (
            tensor.dtype is not self.dtype
            or outer != self.ndim
            or shape[outer:] != self.inner
            or not tensor.is_contiguous()
            or tensor.device != self.device
        ):
            self._refuse(tensor)
        self._describe(tensor.data_ptr(), shape[:outer])
        self.known = weakref.ref(tensor)

    def _describe(self, pointer: int, shape: tuple[int, ...]) -> None:
        self.pointer = self.value.data = pointer
        if shape == self.shape:
            return
        self.shape = shape
        stride = self.dtype.itemsize
        for extent in self.inner:
            stride *= extent
        for axis in reversed(range(self.ndim)):
            self.value.shape[axis] = shape[axis]
            self.value.strides[axis] = stride
            stride *= shape[axis]

    def _refuse(self, tensor: Tensor) -> NoReturn:
        raise TypeError(
            f"{self.name} must be a contiguous {self.dtype} tensor on {self.device} with {self.ndim} dimensions before "
            f"{self.inner}, got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, "
            f"contiguous: {tensor.is_contiguous()}"
        )


class _ValueSlot:
    """A number, vector or matrix argument."""

    def __init__(self, index: int, arg: Any) -> None:
        self.index = index
        self.value: Any = arg.type() if hasattr(arg.type, "_shape_") else 0
        self.packed: tuple[ctypes.Structure, str] | None = None
        self.last: Any = None

    def live_in(self, packed: ctypes.Structure, name: str) -> None:
        self.packed = (packed, name)

    def set(self, command: wp.Launch, value: Any) -> None:
        command.set_param_at_index(self.index, value)
        if self.packed is not None:
            setattr(*self.packed, command.params[self.index + 1])
        self.last = value


@wp.kernel(enable_backward=False)
def _segment_sum(
    values: wp.array2d(dtype=wp.float64),  # type: ignore[valid-type]
    ptr: wp.array(dtype=wp.int64),  # type: ignore[valid-type]
    out: wp.array2d(dtype=wp.float64),  # type: ignore[valid-type]
):
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
    return _by_segment(_segment_sum, values, ptr, 0.0)


@wp.kernel(enable_backward=False)
def _segment_max(
    values: wp.array2d(dtype=wp.float64),  # type: ignore[valid-type]
    ptr: wp.array(dtype=wp.int64),  # type: ignore[valid-type]
    out: wp.array2d(dtype=wp.float64),  # type: ignore[valid-type]
):
    thread = wp.tid()
    columns = out.shape[1]
    segment = thread / columns
    column = thread - segment * columns
    most = out[segment, column]
    for row in range(int(ptr[segment]), int(ptr[segment + 1])):
        value = values[row, column]
        # NaN must win: whoever asks for a maximum wants to hear of it.
        if not (value <= most):
            most = value
            if value != value:
                break
    out[segment, column] = most


def segment_max(values: Tensor, ptr: Tensor) -> Tensor:
    """As `segment_sum`, the maximum: -inf for an empty segment; NaN wins."""
    return _by_segment(_segment_max, values, ptr, -torch.inf)


def _by_segment(kernel: wp.Kernel, values: Tensor, ptr: Tensor, start: float) -> Tensor:
    columns = math.prod(values.shape[1:])
    segments = ptr.shape[0] - 1
    out = torch.full((segments, columns), start, dtype=torch.float64, device=values.device)
    if values.shape[0]:
        launch(kernel, segments * columns, values.contiguous().reshape(values.shape[0], columns), ptr, out)
    return out.reshape(segments, *values.shape[1:])


def warm(device: str = "cpu", modules: Iterable[str] = ()) -> None:
    """Compile (or load from Warp's cache on disk) every kernel of this package now, rather than at first use.

    Args:
        device: where the kernels will run, "cpu" or "cuda:0".
        modules: names of further Python modules with kernels, such as "mattermill.stages.integrators.verlet".

    Compiling everything takes some seconds per module the first time on a machine, milliseconds later. Warp keeps its
    cache in ~/.cache/warp/<version>, or where WARP_CACHE_PATH says; several ranks may compile at once.
    """
    from importlib import import_module

    from .models.lj_kernels import all_pair_kernels

    own = [f"{__package__}.{name}" for name in ("kernels", "cell_kernels", "refresh", "rng")]
    names = list(dict.fromkeys([*own, *modules]))
    for name in names:
        import_module(name)
    wanted = [wp.get_module(name) for name in names]
    wanted += [kernel.module for kernel in all_pair_kernels()]
    wp.force_load(device, wanted)

"""A CUDA device without memory: tensors on it have shapes, strides and a device, and no values (torch's FakeTensor).

Whatever a real one would refuse or wait for is an error here: tensors of two devices in one operation, a value that the
host asks for, a copy that is not queued, host memory that a queued copy may not touch. Kernels are not run; what Triton
would compile for each launch is noted, so that a test can see which launch would wait for the compiler.
"""

import contextlib
import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.aot import gpu_modules
from kernels.card import known_card, read_card

ALIGNMENT = 16  # bytes: Triton compiles loads of 16 for pointers that are multiples of it
MAX_GRID_YZ = 65535
OPTIONS = ("num_warps", "num_stages", "launch_pdl")  # of a launch; all else are parameters of the kernel
BASE_ADDRESS = 1 << 40
ATEN = torch.ops.aten
VIEWS = {"view", "slice", "select", "unsqueeze", "split_with_sizes", "expand", "alias", "detach", "t", "transpose",
         "_unsafe_view", "permute", "as_strided", "_reshape_alias", "squeeze", "lift_fresh", "unsafe_split",
         "split", "unbind"}  # fmt: skip


class DeviceError(BaseException):
    """A real device refuses this, or waits for it. No `except Exception` of the runner takes it for a bad request."""


@dataclass
class FakeCuda:
    """The state of the device. `compiled`: what Triton was asked for; `launched`: names since the last `clear`."""

    compiled: set = field(default_factory=set)
    launched: list = field(default_factory=list)
    pinned: list = field(default_factory=list)  # (first address, end)
    copies: int = 0  # between host and device
    capturing: bool = False
    may_compile: bool = True
    quiet: bool = True  # False while nothing may wait for the device

    def refuse(self, what):
        if self.capturing:
            raise DeviceError(f"{what} while a graph is recorded")
        if not self.quiet:
            raise DeviceError(f"{what} in a step")

    def is_pinned(self, tensor):
        address = tensor.data_ptr()
        return any(begin <= address < end for begin, end in self.pinned)

    def pin(self, tensor):
        """Stands in for Tensor.pin_memory."""
        copy = tensor.clone()
        self.pinned.append((copy.data_ptr(), copy.data_ptr() + copy.nbytes))
        return copy

    def copied(self, target, source, non_blocking):
        """A copy between host and device."""
        self.copies += 1
        host = source if not source.is_cuda else target
        if not non_blocking:
            self.refuse("a copy that waits")
        if not self.is_pinned(host):
            self.refuse("a copy of host memory that is not pinned")
        if self.capturing:
            self.refuse("a copy of host memory")

    def launch(self, name, key):
        self.launched.append(name)
        if key in self.compiled:
            return
        if self.capturing or not self.may_compile:
            raise DeviceError(f"{name} is compiled too late, for {key}")
        self.compiled.add(key)


class _Dispatch(TorchDispatchMode):
    """Operators on tensors of the device are faked, those of the host are done."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        to_device = str(kwargs.get("device", "")).startswith("cuda")
        fakes = [x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        if not fakes and not to_device:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        with self:  # inference mode leaves operators whole that are made of others
            if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        name = func.overloadpacket.__name__
        if name == "_to_copy" and (not fakes or (not to_device and "device" in kwargs)):
            return self._moved(func, args, kwargs)
        if name not in VIEWS:
            self.device.launched.append(name)
        return func(*args, **kwargs)

    def _moved(self, func, args, kwargs):
        """torch pins what `to("cpu", non_blocking=True)` returns; to the device it takes any memory, and may wait."""
        source = args[0]
        if not source.is_cuda:
            self.device.refuse("an upload of memory that is not pinned")
            dtype = kwargs.get("dtype") or source.dtype
            return ATEN.empty.memory_format(source.shape, dtype=dtype, device=FakeCudaQueue.device)
        if not kwargs.get("non_blocking"):
            self.device.refuse("a download that waits")
        if self.device.capturing:
            self.device.refuse("a download")
        with unset_fake_temporarily():
            return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)


class _Python(TorchFunctionMode):
    """x[...] and copy_ of a tensor on the device: their way into the operators asks the driver for the device."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and any(isinstance(x, FakeTensor) for x in args):
            return self._copy(*args, **(kwargs or {}))
        if func is torch.Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return BASE_ADDRESS + args[0].storage_offset() * args[0].element_size()
        if func is torch.Tensor.__getitem__ and isinstance(args[0], FakeTensor):
            return _get(*args)
        if func is torch.Tensor.__setitem__ and isinstance(args[0], FakeTensor):
            return _set(*args, self._copy)
        return func(*args, **(kwargs or {}))

    def _copy(self, target, source, non_blocking=False):
        assert torch.broadcast_shapes(target.shape, source.shape) == target.shape
        if target.is_cuda and source.is_cuda:
            self.device.launched.append("copy_")
        else:
            self.device.copied(target, source, non_blocking)
        return target


def _get(x, index):
    x, at = _part(x, index)
    return ATEN.index.Tensor(x, at) if at else x


def _set(x, index, value, copy):
    x, at = _part(x, index)
    if at:
        ATEN.index_put_.default(x, at, torch.as_tensor(value, dtype=x.dtype))
    elif isinstance(value, torch.Tensor):
        copy(x, value)
    else:
        x.fill_(value)


def _part(x, index):
    """(view of x, tensors to index it with)."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [i for i in index if not isinstance(i, torch.Tensor)]:
        place = next(i for i, item in enumerate(index) if item is Ellipsis)
        missing = x.dim() - sum(item is not None for item in index) + 1
        index = (*index[:place], *[slice(None)] * missing, *index[place + 1 :])
    at, dim = [], 0
    for item in index:
        if isinstance(item, int):
            x = x.select(dim, item)
            continue
        if item is None:
            x = x.unsqueeze(dim)
        elif isinstance(item, slice):
            x = ATEN.slice.Tensor(x, dim, item.start, item.stop, item.step or 1)
        else:
            if not item.is_cuda:
                raise DeviceError("a tensor of the device is indexed with one of the host")
            at += [None] * (dim - len(at)) + [item]
        dim += 1
    return x, at


class FakeKernel:
    """Stands in for a kernel: checks what a launch is given, and notes what it would be compiled for."""

    def __init__(self, kernel, device):
        self.kernel, self.device = kernel, device
        self.name = kernel.fn.__name__
        self.signature = inspect.signature(kernel.fn)

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launch(grid, args, kwargs)

    def launch(self, grid, args, kwargs):
        assert 1 <= len(grid) <= 3 and all(type(n) is int and n >= 0 for n in grid), f"{self.name}: grid {grid}"
        assert all(n <= MAX_GRID_YZ for n in grid[1:]), f"{self.name}: grid {grid}"
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        given = self.signature.bind(*args, **kwargs).arguments
        assert len(given) == len(self.signature.parameters), f"{self.name} lacks arguments"
        key = tuple(self._kind(param, given[param.name]) for param in self.kernel.params)
        self.device.launch(self.name, (self.name, key, *options.items()))

    def _kind(self, param, value):
        """As triton.runtime.jit sees an argument: its type, and what the binary relies on."""
        if param.is_constexpr or value is None:
            return param.name, value
        if isinstance(value, torch.Tensor):
            assert value.is_cuda, f"{self.name}: {param.name} is a tensor of the host"
            start = value.storage_offset() * value.element_size()
            aligned = start % ALIGNMENT == 0 or param.do_not_specialize or param.do_not_specialize_on_alignment
            return param.name, str(value.dtype), aligned
        if isinstance(value, TensorDescriptor):  # rows that the copy engine fetches
            assert value.base.is_cuda and value.base.storage_offset() * value.base.element_size() % ALIGNMENT == 0
            return param.name, str(value.base.dtype), tuple(value.block_shape)
        if isinstance(value, float) or param.do_not_specialize:
            return param.name, type(value)
        assert isinstance(value, int), f"{self.name}: {param.name} is {value!r}"
        return param.name, value == 1, value % 16 == 0


class FakeCudaQueue:
    """A DeviceQueue of the device: what is queued is done at once."""

    device = torch.device("cuda", 0)

    def __init__(self, device):
        self._fake = device

    def host_bytes(self, num_bytes):
        memory = torch.zeros(max(1, num_bytes), dtype=torch.uint8)[:num_bytes]
        self._fake.pinned.append((memory.data_ptr(), memory.data_ptr() + num_bytes))
        return memory

    def copy_queue(self):
        return self

    def copy(self, target, source):
        target.copy_(source, non_blocking=True)

    def run(self, work):
        return work()

    def mark(self):
        return SimpleNamespace(wait=lambda: None, done=lambda: True)

    def after(self, mark):
        pass

    def capture(self, work):
        self._fake.capturing = True
        try:
            work()
        finally:
            self._fake.capturing = False
        return lambda: self._fake.launched.append("graph")

    def free_bytes(self):
        return 1 << 36


@contextlib.contextmanager
def fake_cuda(monkeypatch, capability=(9, 0), num_sms=132):
    """Everything inside finds a GPU: FakeCuda."""
    device = FakeCuda()
    card = known_card(10 * capability[0] + capability[1])
    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=num_sms, warp_size=32,
        shared_memory_per_block_optin=card.shared_memory, shared_memory_per_multiprocessor=card.shared_memory_per_sm,
        regs_per_multiprocessor=card.registers_per_sm, max_threads_per_multi_processor=32 * card.warps_per_sm,
    )  # fmt: skip
    for name, value in {
        "is_available": True, "get_device_capability": capability, "get_device_properties": properties,
        "memory_allocated": 1 << 30, "max_memory_allocated": 1 << 31, "memory_reserved": 1 << 31,
        "mem_get_info": (70 << 30, 80 << 30), "reset_peak_memory_stats": None, "empty_cache": None,
        "synchronize": None, "current_device": 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: device.pin(tensor))
    for module in gpu_modules():
        for name, value in list(vars(module).items()):
            if name.endswith("_kernel") and isinstance(value, triton.JITFunction):
                monkeypatch.setattr(module, name, FakeKernel(value, device))
    read_card.cache_clear()
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True), _Dispatch(device), _Python(device):
        torch._C._set_only_lift_cpu_tensors(True)
        yield device
    read_card.cache_clear()

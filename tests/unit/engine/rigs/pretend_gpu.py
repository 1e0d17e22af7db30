"""A pretended GPU: tensors whose device is `cuda:0` and that compute on the CPU.

Operations that a real GPU refuses are refused: tensors of two devices in one operation. Operations for which a real one
would wait are recorded, and refused where no wait is allowed: reading a value, sizes that depend on values, copies that
are not between pinned memory and the device. A graph is recorded operation by operation and replayed over the same
memory.

Streams are not modelled: every operation completes at once, so a missing order does not show.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten

# Their result's size, or the result itself, is a value that the host has to read.
_READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_HOST_READS = {aten._local_scalar_dense.default, aten.equal.default}


class OnGpu(torch.Tensor):
    """A tensor whose values are in `inner`; a view's `inner` is a view. Only Python sees the device: a torch without
    CUDA has no guard for it, so decisions that torch makes by device before Python is called are made again here.
    """

    inner: torch.Tensor  # type: ignore[assignment]
    gpu: "PretendGpu"

    @staticmethod
    def __new__(cls: type["OnGpu"], inner: torch.Tensor) -> "OnGpu":
        made: OnGpu = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        with cls.gpu:  # a mode is its own thread's
            return func(*args, **(kwargs or {}))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.to("cpu")

    def to(self, *given: Any, **named: Any) -> torch.Tensor:
        device, dtype, _, _ = torch._C._nn._parse_to(*given, **named)
        if device is None or device.type != "cpu":
            return self if dtype in (None, self.dtype) else aten._to_copy(self, dtype=dtype)
        self.gpu.wait("copy cuda -> pageable memory")
        return self.inner.to(dtype or self.dtype, copy=True)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"OnGpu({self.inner!r})"

    @property
    def data(self) -> torch.Tensor:
        return OnGpu(self.inner.detach())

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        assert isinstance(other, OnGpu)
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.inner = other.inner


class PretendGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The pretended GPU. `waits`: the operations for which the host waited."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[str] = []
        self.may_wait = True
        self._pinned: dict[int, torch.Tensor] = {}  # kept, so that no address is used again
        self._recording: list[Callable[[], None]] | None = None
        OnGpu.gpu = self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.inference_mode(False), torch.no_grad():  # wrappers cannot be what inference mode makes
            return self._dispatched(func, args, kwargs)

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = dict(kwargs or {})
        decomposed = self._decomposed(func, args, given)
        if decomposed is not NotImplemented:
            return decomposed
        flat = tree_flatten((args, given))[0]
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        ours = [value for value in tensors if isinstance(value, OnGpu)]
        if func is aten._to_copy.default and isinstance(args[0], OnGpu):
            given.pop("device", None)  # what `OnGpu.to` leaves stays where it is
        wanted = torch.device(given["device"]) if given.get("device") is not None else None
        pins = bool(given.pop("pin_memory", None))
        if not ours and (wanted is None or wanted.type != "cuda"):
            made = func(*args, **given)
            return self.pin(made) if pins else made
        if func in (aten._to_copy.default, aten.copy_.default) and (len(ours) < len(tensors) or wanted is not None):
            return self._copied(func, args, given, wanted)
        self._check(func, args, tensors, ours)
        goes_home = wanted is not None and wanted.type == "cpu"
        if wanted is not None:
            given["device"] = torch.device("cpu")
        made = self._compute(func, args, given)
        if pins:
            return self.pin(made)
        if func in _HOST_READS or goes_home:
            return made
        return self._wrapped(func, args, given, made)

    def _decomposed(self, func: Any, args: Any, given: dict[str, Any]) -> Any:
        """Decompose operations that torch keeps whole in inference mode."""
        if func.overloadpacket is aten.to:
            named = {**{item.name: value for item, value in zip(func._schema.arguments, args, strict=False)}, **given}
            source = named.pop("self")
            named.pop("copy", None)
            other = named.pop("other", None)
            if other is not None:
                named |= {"device": other.device, "dtype": other.dtype}
            return self._dispatched(aten._to_copy.default, (source,), named)
        with self:
            return func.decompose(*args, **given)

    def launch(self, work: Callable[[], None]) -> None:
        """Launch one of Tandem's own kernels."""
        work()
        if self._recording is not None:
            self._recording.append(work)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Callable[[], None]]]:
        """Record the operations of the device in this block; they must neither wait nor use host data."""
        work: list[Callable[[], None]] = []
        self._recording = work
        try:
            with self.no_waits():
                yield work
        finally:
            self._recording = None

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        before, self.may_wait = self.may_wait, False
        try:
            yield
        finally:
            self.may_wait = before

    def wait(self, what: str) -> None:
        self.waits.append(what)
        if not self.may_wait:
            raise RuntimeError(f"called a synchronizing operation: {what}")

    def _check(self, func: Any, args: Any, tensors: list[torch.Tensor], ours: list[OnGpu]) -> None:
        if func in _READS or (func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16):
            self.wait(str(func))  # a grouped product of another dtype is computed group by group
        theirs = [tensor for tensor in tensors if not isinstance(tensor, OnGpu)]
        if func in _INDEXED and isinstance(args[0], OnGpu):
            for index in (index for index in args[1] if index is not None):
                if not isinstance(index, OnGpu) or index.dtype in (torch.bool, torch.uint8):
                    self.wait(f"{func} by {index.dtype} on {index.device}")
            if len(args) > 2 and not isinstance(args[2], OnGpu):
                self.wait(f"{func} of a number on the host")
                if args[2].dim():
                    raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
        elif any(tensor.dim() for tensor in theirs):
            raise RuntimeError(f"Expected all tensors to be on the same device: {func}")

    def _copied(self, func: Any, args: Any, given: dict[str, Any], wanted: torch.device | None) -> torch.Tensor:
        """Copy between the host and the device."""
        is_new = func is aten._to_copy.default
        source = args[0] if is_new else args[1]
        target_device = (wanted or source.device) if is_new else args[0].device
        non_blocking = bool(given.pop("non_blocking", False) or (not is_new and len(args) > 2 and args[2]))
        if target_device.type != source.device.type:
            if self._recording is not None:
                raise RuntimeError(f"{func}: a graph would copy from the host at every replay")
            host = source if target_device.type == "cuda" else (None if is_new else args[0])
            if not non_blocking or host is None or not self._is_pinned(host):
                self.wait(f"{func} {source.device.type} -> {target_device.type}")
        if is_new:
            made = self._compute(func, args, given | {"device": torch.device("cpu")})
            return OnGpu(made) if target_device.type == "cuda" else made
        self._compute(func, args[:2], {})
        return args[0]  # type: ignore[no-any-return]

    def _compute(self, func: Any, args: Any, given: dict[str, Any]) -> Any:
        values, named = tree_map_only(OnGpu, lambda tensor: tensor.inner, (args, given))
        if func is aten.histc.default and not values[0].is_floating_point():  # which a CPU does not know
            func = _whole_histogram
        made = func(*values, **named)
        if self._recording is not None:
            self._recording.append(_again(func, values, named, made))
        return made

    def _wrapped(self, func: Any, args: Any, given: dict[str, Any], made: Any) -> Any:
        """Wrap results; an operation in place returns the tensor that was given."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = given.get(argument.name) if argument.kwarg_only or position >= len(args) else args[position]
                if isinstance(made, torch.Tensor) and isinstance(value, OnGpu) and made is value.inner:
                    return value
        return tree_map_only(torch.Tensor, OnGpu, made)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, OnGpu) and tensor.untyped_storage().data_ptr() in self._pinned


def _whole_histogram(values: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    return torch.histc(values.float(), *given, **named).to(values.dtype)


_whole_histogram._schema = aten.histc.default._schema  # type: ignore[attr-defined]


def _again(func: Any, values: Any, named: dict[str, Any], made: Any) -> Callable[[], None]:
    """Repeat an operation on the same memory, with its results at the same place."""
    is_view = any(item.alias_info is not None and not item.alias_info.is_write for item in func._schema.returns)

    def replay() -> None:
        if is_view:
            return
        again = tree_flatten(func(*values, **named))[0]
        for old, new in zip(tree_flatten(made)[0], again, strict=True):
            if isinstance(old, torch.Tensor) and new is not old:
                old.copy_(new)

    return replay


class _Event:
    def __init__(self, *_: object, **__: object) -> None:
        self.is_recorded = False

    def record(self, stream: object = None) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded

    def query(self) -> bool:
        return self.is_recorded


class _Stream:
    def __init__(self, gpu: PretendGpu) -> None:
        self._gpu = gpu

    def synchronize(self) -> None:
        self._gpu.wait("stream")

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...


class _Properties:
    multi_processor_count = 132
    name = "a GPU that is not there"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendGpu]:
    """Replace the CUDA functions of torch that the engine calls by those of a pretended GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a real one here")
    pretended = PretendGpu()
    stream = _Stream(pretended)
    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "current_stream": lambda device=None: stream,
        "device": lambda device: contextlib.nullcontext(),
        "set_device": lambda device: None,
        "Event": _Event,
        "get_device_properties": lambda device=None: _Properties(),
        "get_device_capability": lambda device=None: (9, 0),
        "synchronize": lambda device=None: pretended.wait("device"),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (0, 0),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    tensor = torch.tensor

    def made(data: Any, *, device: torch.device | str | None = None, **named: Any) -> torch.Tensor:
        plain = tensor(data, **named)
        return plain if device is None else aten._to_copy(plain, device=torch.device(device))

    monkeypatch.setattr(torch, "tensor", made)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pretended.pin(tensor.clone()))
    with pretended:
        yield pretended


def moved(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module with its parameters and buffers on the device, as `to` does, without torch's own
    bookkeeping.
    """
    seen: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    found = seen.setdefault(id(tensor), OnGpu(tensor.detach()))
                    table[name] = torch.nn.Parameter(found, requires_grad=False) if table is part._parameters else found  # type: ignore[assignment]
    return module


def played(gpu: PretendGpu) -> Callable[[Callable[[], object], Callable[[], None]], Callable[[], None]]:
    """Capture a graph; implements Capture."""

    def capture(compute: Callable[[], object], prepare: Callable[[], None]) -> Callable[[], None]:
        prepare()
        compute()
        prepare()
        with gpu.recording() as work:
            compute()

        def replay() -> None:
            for each in work:
                each()

        return replay

    return capture

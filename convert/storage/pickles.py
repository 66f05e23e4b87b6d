"""Read the object tree of a pickle without running any of it and without importing torch.

Every name in the pickle must stand in a fixed list, and every name resolves to an inert stand-in: a class that only
keeps its arguments, or a plain container. A name that is not in the list stops the reading.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from draftsmith.configs.target import ELEMENT_BYTES

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "bool": "BOOL", "complex64": "C64", "complex128": "C128",
}  # fmt: skip
"""Name of a torch dtype -> name in a safetensors header."""

BYTES = ELEMENT_BYTES | {"F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "C64": 8, "C128": 16}
"""Size of an element."""

STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64", "ComplexDoubleStorage": "C128",
}  # fmt: skip

UNTYPED = "U8"
"""An untyped storage counts bytes."""

INERT = frozenset(
    [
        "_codecs.encode",
        "argparse.Namespace",
        "builtins.bytearray",
        "builtins.complex",
        "collections.Counter",
        "collections.defaultdict",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy.dtype",
        "numpy.ndarray",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "pathlib.Path",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib.PureWindowsPath",
        "pathlib.WindowsPath",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
        "torch.Tensor",
        "torch.device",
        "torch.serialization._get_layout",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.utils.tensor_fragment.tensor_fragment",
    ]
)
"""Names that checkpoints hold beside tensors; they become stand-ins that keep their arguments."""


class ForeignNameError(Exception):
    """The pickle names something that is not in the list: a class of somebody's, or a function to be run."""


class Inert:
    """Stands for an object of the pickle; `args` and `state` are what the pickle would have built it from."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Keep the arguments."""
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Entries of a mapping that nobody reads."""

    def append(self, value: Any) -> None:
        """Elements of a list that nobody reads."""

    def field(self, name: str) -> Any:
        """One of the object's attributes; None if the pickle does not set it."""
        return self.state.get(name) if isinstance(self.state, dict) else None


@dataclass(frozen=True)
class RawStorage:
    """A torch storage as a pickle names it, unchecked: its key in the file, its dtype and its number of elements."""

    key: Any
    dtype: Any
    count: Any


@dataclass(frozen=True)
class RawTensor:
    """A tensor as a pickle describes it, unchecked: a window into a storage, in elements."""

    storage: Any
    offset: Any
    shape: Any
    stride: Any
    dtype: Any = None


class SafeUnpickler(pickle._Unpickler):
    """Builds the tree of a pickle from stand-ins. The pure-Python reader: its memo cannot be made to grow at will."""

    def __init__(self, stream: IO[bytes], persistent: Callable[[Any], Any] | None = None) -> None:
        super().__init__(stream)
        self.persistent = persistent
        self.known = _stand_ins()  # made anew for every pickle, so that nothing a pickle does to them outlives it

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name of the pickle.

        Raises:
            ForeignNameError: a name that is not in the list.
        """
        full = f"{module}.{name}"
        if full not in self.known:
            raise ForeignNameError(full)
        return self.known[full]

    def persistent_load(self, pid: Any) -> Any:
        """A storage, by what the pickle says of it."""
        if self.persistent is None:
            raise pickle.UnpicklingError("a storage where none can be")
        return self.persistent(pid)


def storage_of(pid: Any) -> RawStorage:
    """The storage that a persistent id ("storage", type, key, device, elements[, None]) describes."""
    if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
        raise pickle.UnpicklingError("a reference that is no storage")
    if len(pid) == 6 and pid[5] is not None:
        raise pickle.UnpicklingError("a view of a storage, as torch 0.3 and older wrote")
    return RawStorage(pid[2], pid[1], pid[4])


def _stand_ins() -> dict[str, Any]:
    def tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> RawTensor:
        return RawTensor(storage, offset, size, stride)

    def typed_tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> RawTensor:
        return RawTensor(storage, offset, size, stride, rest[2])

    def parameter(data: Any, *_: Any) -> Any:
        return data

    def of_type(function: Any, kind: Any, arguments: Any, *_: Any) -> Any:
        if function not in (tensor, typed_tensor):
            raise pickle.UnpicklingError("a tensor of a foreign class")
        return function(*arguments)

    known: dict[str, Any] = {name: type(name, (Inert,), {}) for name in INERT}
    known |= {
        "collections.OrderedDict": OrderedDict,
        "builtins.set": set,
        "torch.Size": tuple,
        "torch._utils._rebuild_tensor": tensor,
        "torch._utils._rebuild_tensor_v2": tensor,
        "torch._utils._rebuild_tensor_v3": typed_tensor,
        "torch._utils._rebuild_parameter": parameter,
        "torch._utils._rebuild_parameter_with_state": parameter,
        "torch._tensor._rebuild_from_type_v2": of_type,
        "torch.nn.parameter.Parameter": parameter,
        "torch.storage.UntypedStorage": UNTYPED,
    }
    known |= {f"torch.{name}": dtype for name, dtype in DTYPES.items()}
    return known | {f"torch.{name}": dtype for name, dtype in STORAGES.items()}

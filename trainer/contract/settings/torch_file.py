"""The tensor in a file that `torch.save` has written, found without torch and without unpickling.

Since torch 1.6 such a file is a zip whose members lie in it as they are: `data.pkl` says which tensors there are, and
`data/0`, `data/1`, ... hold their numbers. A pickle is a program; its steps are listed with `pickletools.genops`, and
calls that make tensors, tables and lists are followed here by hand. What asks for anything else to be called is
refused, so that no file can run code.
"""

from __future__ import annotations

import itertools
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainer.contract.files import open_plain
from trainer.contract.settings.rows import NotRowsError, RowRange, choose_tensor, rows_and_width

SUFFIXES = (".pt", ".pth")
# Tensors take 300 bytes each in it; what is larger holds numbers or texts as Python objects.
_LARGEST_PICKLE = 10_000_000
_LOCAL_HEADER = struct.Struct("<26xHH")
# torch's names of the types that are read, and the safetensors names of the same types.
_DTYPES = {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64"}
_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
# The first bytes of a file in the format of torch before 1.6, which later versions can also write.
_OLD_KIND = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
_AGAIN = 'write it again with torch.save({"activations": x.contiguous()}, file)'


class _Name(str):
    """A class or function that a pickle names, as `module.name`; it is never looked up."""


class _Storage(NamedTuple):
    kind: str
    member: str


class _Tensor(NamedTuple):
    """Sizes and strides count numbers, not bytes; the first number is the storage's number `first`."""

    storage: _Storage
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_file(file: Path, name: str) -> RowRange:
    """Find the rows of a tensor [..., d_in], or of the one by this name in a table of them.

    Raise `OSError`, or `NotRowsError`.
    """
    try:
        refuse_old_kind(file)
        with open_plain(file) as stream, zipfile.ZipFile(stream) as archive:
            pickle = next((entry for entry in archive.namelist() if entry.endswith("/data.pkl")), None)
            if pickle is None:
                raise NotRowsError(f"it is a zip, but not from torch.save; {_AGAIN}")
            folder = pickle.removesuffix("data.pkl")
            _require_little_endian(archive, folder)
            tensor = _tensor_of(_read_pickle(archive, pickle), name)
            member = archive.getinfo(f"{folder}data/{tensor.storage.member}")
            return _rows_of(tensor, member, _begin(stream, member))
    except NotRowsError:
        raise
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, OverflowError):
        raise NotRowsError(f"it is damaged, or not a file of torch.save; {_AGAIN}") from None
    except KeyError:
        raise NotRowsError("the data of its tensor is missing; copy it again") from None
    except (NotImplementedError, RuntimeError):
        raise NotRowsError(f"it is compressed or encrypted; {_AGAIN}") from None


def refuse_old_kind(file: Path) -> None:
    """Raise `NotRowsError` for a file in the format of torch.save before 1.6, or `OSError`."""
    with open_plain(file) as stream:
        if stream.read(len(_OLD_KIND)) == _OLD_KIND:
            raise NotRowsError("it is in the format of torch.save before 1.6; load it with torch and save it again")


def _require_little_endian(archive: zipfile.ZipFile, folder: str) -> None:
    if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
        raise NotRowsError(f"its numbers are big-endian; {_AGAIN} on a machine like this one")


def _read_pickle(archive: zipfile.ZipFile, pickle: str) -> Any:
    if archive.getinfo(pickle).file_size > _LARGEST_PICKLE:
        raise NotRowsError(f"it holds more than tensors; {_AGAIN}")
    try:
        return _Pickle().follow(archive.read(pickle))
    except NotRowsError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError):
        raise NotRowsError("its list of tensors is damaged; copy it again") from None


def _tensor_of(value: Any, name: str) -> _Tensor:
    if isinstance(value, dict):
        tensors = {key: one for key, one in value.items() if isinstance(one, _Tensor)}
        value = tensors[choose_tensor(name, {key: (one.storage.kind, one.shape) for key, one in tensors.items()})]
    if not isinstance(value, _Tensor):
        raise NotRowsError(f"it holds no tensor; {_AGAIN}")
    return value


def _rows_of(tensor: _Tensor, member: zipfile.ZipInfo, begin: int) -> RowRange:
    shape, dtype = tensor.shape, _DTYPES.get(tensor.storage.kind, tensor.storage.kind)
    rows, width = rows_and_width(shape)
    if dtype not in _BYTES or not rows * width:
        return RowRange(begin, rows, width, dtype)
    if member.compress_type != zipfile.ZIP_STORED:
        raise NotRowsError(f"it is compressed; {_AGAIN}")
    dense = [*itertools.accumulate(reversed(shape[1:]), initial=1, func=lambda a, b: a * b)][::-1]
    if any(size > 1 and stride != wanted for size, stride, wanted in zip(shape, tensor.strides, dense, strict=True)):
        raise NotRowsError(f"its tensor is not contiguous; {_AGAIN}")
    if (tensor.first + rows * width) * _BYTES[dtype] > member.file_size:
        raise NotRowsError("its tensor is larger than what the file holds; copy it again")
    return RowRange(begin + tensor.first * _BYTES[dtype], rows, width, dtype)


def _begin(stream: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Return the byte of the file at which a member's own bytes begin."""
    stream.seek(member.header_offset)
    header = stream.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size:
        raise zipfile.BadZipFile
    name_length, extra_length = _LOCAL_HEADER.unpack(header)
    return member.header_offset + _LOCAL_HEADER.size + int(name_length) + int(extra_length)


class _Pickle:
    """Follows the steps of a pickle with a stack, as `pickle` does, but calls nothing that the file names."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def follow(self, pickled: bytes) -> Any:
        """Return the value, in which every tensor is a `_Tensor`; raise `NotRowsError`, or as Python does."""
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name in _VALUES:
                self._stack.append(_VALUES[opcode.name](argument))
            elif step := _STEPS.get(opcode.name):
                step(self, argument)
            else:
                raise NotRowsError(f"it can only be read by running code ({opcode.name}); {_AGAIN}")
        return self._stack.pop()

    def nothing(self, _: Any) -> None:
        """Do nothing: the step is of no consequence here."""

    def mark(self, _: Any) -> None:
        self._below.append(self._stack)
        self._stack = []

    def put(self, place: int | None) -> None:
        self._memo[len(self._memo) if place is None else place] = self._stack[-1]

    def get(self, place: int) -> None:
        self._stack.append(self._memo[place])

    def tuple_of(self, n: int) -> None:
        values = self._stack[-n:]
        del self._stack[-n:]
        self._stack.append(tuple(values))

    def tuple_from_mark(self, _: Any) -> None:
        values = self._since_mark()
        self._stack.append(tuple(values))

    def append(self, _: Any) -> None:
        value = self._stack.pop()
        self._stack[-1].append(value)

    def extend(self, _: Any) -> None:
        values = self._since_mark()
        self._stack[-1].extend(values)

    def set_item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def set_items(self, _: Any) -> None:
        self._set(self._since_mark())

    def name(self, argument: str) -> None:
        self._stack.append(_Name(argument.replace(" ", ".")))

    def name_from_stack(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(_Name(f"{module:s}.{name:s}"))

    def storage(self, _: Any) -> None:
        _, kind, member, _, _ = self._stack.pop()
        self._stack.append(_Storage(str(kind).removeprefix("torch."), str(member)))

    def call(self, _: Any) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if not isinstance(name, _Name) or name not in _CALLS:
            called = f"{name:s}" if isinstance(name, _Name) else "an object"
            raise NotRowsError(f"it can only be read by running code ({called[:80]}); {_AGAIN}")
        self._stack.append(_CALLS[name](*arguments))

    def build(self, _: Any) -> None:
        """Drop attributes of a table other than its items, such as the versions in the weights of a module."""
        self._stack.pop()
        if not isinstance(self._stack[-1], dict):
            raise NotRowsError(f"it can only be read by running code (BUILD); {_AGAIN}")

    def _since_mark(self) -> list[Any]:
        values, self._stack = self._stack, self._below.pop()
        return values

    def _set(self, items: list[Any]) -> None:
        # Other keys than texts are of no use here, and a nested one can take for ever to hash.
        pairs = zip(items[::2], items[1::2], strict=True)
        self._stack[-1].update((key, value) for key, value in pairs if isinstance(key, str))


def _tensor(storage: _Storage, first: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> _Tensor:
    numbers = (first, *shape, *strides)
    if not isinstance(storage, _Storage) or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError
    if len(shape) != len(strides):
        raise ValueError
    return _Tensor(storage, first, shape, strides)


def _table() -> dict[str, Any]:
    # Not `dict`, which would take what the file gives it, and hash that.
    return {}


_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch.Size": lambda sizes: sizes,
    "collections.OrderedDict": _table,
}
_VALUES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), lambda argument: argument),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"), lambda argument: argument),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
}
_STEPS: dict[str, Callable[[_Pickle, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _Pickle.nothing),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Pickle.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Pickle.get),
    "MARK": _Pickle.mark,
    "TUPLE": _Pickle.tuple_from_mark,
    "TUPLE1": lambda pickle, _: pickle.tuple_of(1),
    "TUPLE2": lambda pickle, _: pickle.tuple_of(2),
    "TUPLE3": lambda pickle, _: pickle.tuple_of(3),
    "APPEND": _Pickle.append,
    "APPENDS": _Pickle.extend,
    "SETITEM": _Pickle.set_item,
    "SETITEMS": _Pickle.set_items,
    "GLOBAL": _Pickle.name,
    "STACK_GLOBAL": _Pickle.name_from_stack,
    "BINPERSID": _Pickle.storage,
    "REDUCE": _Pickle.call,
    "NEWOBJ": _Pickle.call,
    "BUILD": _Pickle.build,
}

"""A safetensors file written tensor by tensor, so that memory holds one batch and never the whole result.

`safetensors.torch.save_file` wants every tensor at once. The format only wants its header first: 8 bytes of length,
then JSON with each tensor's dtype, shape and byte range. Here room is kept for the header, the tensors follow as they
come, and the header is filled in last, padded with the spaces that the format allows.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ENTRY_BYTES = 160  # of JSON a tensor beside its name: dtype, three sides, two offsets


class FeatureFile:
    """Writes `path` when its `with` block ends well; after an exception, or with no tensor, `path` is left as it was.

    Args:
        path: written as `<path>.part` and then renamed. OSError on entry if that cannot be done.
        names: every name that `add` may be called with.
        metadata: text by name, the file's `__metadata__`; its texts may be replaced by shorter ones until the end.
    """

    def __init__(self, path: Path | str, names: Sequence[str], metadata: Mapping[str, str]) -> None:
        self.path = Path(path)
        self.names: list[str] = []
        self.metadata = dict(metadata)
        self._part = self.path.with_name(f"{self.path.name}.part")
        self._header: dict[str, Any] = {"__metadata__": self.metadata}
        room = len(json.dumps(self._header)) + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
        self._room = -(-room // 8) * 8  # the tensors start at a multiple of 8 bytes
        self._end = 0

    def __enter__(self) -> "FeatureFile":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_dir():
            raise IsADirectoryError(f"{self.path} is a folder")
        self._file = self._part.open("wb")
        self._file.seek(8 + self._room)
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        """Appends one host tensor under a name that was announced."""
        if name in self._header:
            raise ValueError(f"{name!r} is already in {self.path}")
        data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        self._file.write(data)
        self._header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._end, self._end + data.nbytes],
        }
        self._end += data.nbytes
        self.names.append(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None and self.names:
                header = json.dumps(self._header).encode().ljust(self._room)
                assert len(header) == self._room, "more names or longer metadata than was announced"
                self._file.seek(0)
                self._file.write(len(header).to_bytes(8, "little") + header)
        if kind is None and self.names:
            os.replace(self._part, self.path)
        else:
            self._part.unlink()

"""Writes features as safetensors: one file, or past a size several files and an index, as transformers does.

Features of 3 GiB with shards of 1 GiB become `f-00001-of-00003.safetensors` to `f-00003-of-00003.safetensors` and
`f.safetensors.index.json`, whose `weight_map` names the file of each tensor.

Test: tests/test_cli.py, tests/test_faults_commands.py.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..geometry import GridLike
from .output import CommandError


class FeatureFile:
    """Writes `path`, or its shards and index, when its `with` block ends without an exception.

    Until then all is written to a folder beside `path`: after an exception, or with no tensor, the files of an earlier
    run are as they were. Memory holds the tensors of one shard.

    Args:
        path: the single file; shards and index get names made from it.
        metadata: text by name; every file gets it, and `grids` beside it, the grid of each image in the file as JSON.
        max_shard_bytes: most bytes of one file's tensors. A larger tensor is a file alone.

    Raises:
        CommandError: on entry if `path` cannot be written, later if writing fails.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str], max_shard_bytes: int) -> None:
        self.path, self.metadata, self.max_shard_bytes = path, dict(metadata), max_shard_bytes
        self._shard: dict[str, Tensor] = {}  # not written yet
        self._grids: dict[str, GridLike] = {}
        self._written: list[list[str]] = []  # the names in each shard that is written
        self._bytes = [0]  # of each shard

    def __enter__(self) -> "FeatureFile":
        with self._errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_dir():
                raise IsADirectoryError("it is a folder")
            if self.path.exists() and not self.path.is_file():
                raise OSError("it is no regular file")  # a device would be replaced by a file
            self._folder = tempfile.TemporaryDirectory(prefix=f".{self.path.name[:50]}.", dir=self.path.parent)
        return self

    def add(self, name: str, tensor: Tensor, grid: GridLike) -> None:
        """Takes one tensor on the host; writes a shard when it is full."""
        if name in self._grids:
            raise ValueError(f"{name!r} is already in {self.path}")
        if self._shard and self._bytes[-1] + tensor.nbytes > self.max_shard_bytes:
            self._write_shard()
        self._grids[name] = grid
        # A copy, because a view of a batch would keep the whole batch in memory.
        self._shard[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._bytes[-1] += tensor.nbytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._folder:
            if kind is None and self._grids:
                self._write_shard()
                with self._errors():
                    self._publish()

    def _part(self, number: int) -> Path:
        return Path(self._folder.name, str(number))

    def _write_shard(self) -> None:
        names = list(self._shard)
        part = self._part(len(self._written))
        with self._errors():
            part.touch()
            mode = part.stat().st_mode
            save_file(self._shard, part, self.metadata | {"grids": self._grids_of(names)})
            part.chmod(mode)  # safetensors makes files that only their owner can read
        self._written.append(names)
        self._shard = {}
        self._bytes.append(0)

    def _grids_of(self, names: list[str]) -> str:
        return json.dumps({name: self._grids[name] for name in names})

    def _publish(self) -> None:
        """Moves the parts to their names. An old index goes first: it must never name new shards."""
        index, count = self.path.with_name(f"{self.path.name}.index.json"), len(self._written)
        stem, suffix = self.path.stem, self.path.suffix
        shard = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}{re.escape(suffix)}")
        earlier = {self.path, *(path for path in self.path.parent.iterdir() if shard.fullmatch(path.name))}
        index.unlink(missing_ok=True)
        files = [self.path]
        if count > 1:
            files = [self.path.with_name(f"{stem}-{n:05}-of-{count:05}{suffix}") for n in range(1, count + 1)]
        for number, file in enumerate(files):
            os.replace(self._part(number), file)
        for path in earlier - set(files):
            path.unlink(missing_ok=True)
        if count > 1:
            metadata = self.metadata | {"grids": self._grids_of(list(self._grids)), "total_size": sum(self._bytes)}
            file_of = {name: file.name for names, file in zip(self._written, files, strict=True) for name in names}
            self._part(count).write_text(
                json.dumps({"metadata": metadata, "weight_map": file_of}, indent=2), encoding="utf-8"
            )
            os.replace(self._part(count), index)

    @contextlib.contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise CommandError(f"cannot write {self.path}: {reason}") from error

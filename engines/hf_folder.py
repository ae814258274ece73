"""The weights of a Hugging Face folder, read tensor by tensor."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from milepost.storage import files

if TYPE_CHECKING:
    from torch import Tensor


class HfFolder:
    """The safetensors of a Hugging Face folder. ValueError names a file that is damaged or not there."""

    def __init__(self, path: str) -> None:
        self._folder = Path(path)
        index = self._folder / "model.safetensors.index.json"
        if index.exists():
            self._file_of: dict[str, str] = files.read_json(str(index))["weight_map"]
            return
        found = sorted(file.name for file in self._folder.glob("*.safetensors"))
        if not found:
            raise ValueError(f"model folder {path!r} has no safetensors files: convert the weights to safetensors")
        self._file_of = {name: file for file in found for name in self._names_in(file)}

    def tensor(self, name: str) -> "Tensor":
        if name not in self._file_of:
            raise ValueError(
                f"model folder {str(self._folder)!r} has no weight {name!r}: it is not what config.json says"
            )
        with self._opened(self._file_of[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def named_tensors(self) -> "Iterator[tuple[str, Tensor]]":
        return ((name, self.tensor(name)) for name in self._file_of)

    def require_whole(self) -> None:
        """Look at every file, which must be as long as it says, and have the weights that the index names."""
        for file in sorted(set(self._file_of.values())):
            lacking = {name for name, place in self._file_of.items() if place == file} - set(self._names_in(file))
            if lacking:
                raise ValueError(f"{str(self._folder / file)!r} has no weight {min(lacking)!r}, which the index names")

    def _names_in(self, file: str) -> list[str]:
        with self._opened(file, "np") as opened:  # "pt" would import torch
            return list(opened.keys())

    @contextmanager
    def _opened(self, file: str, framework: str) -> Iterator[Any]:
        path = self._folder / file
        try:
            with safe_open(path, framework=framework) as opened:
                yield opened
        except FileNotFoundError:
            raise ValueError(f"{str(path)!r} is not there, and the index names it: copy the folder again") from None
        except SafetensorError as error:
            raise ValueError(f"{str(path)!r} is damaged ({error}): copy it again") from error

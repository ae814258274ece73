"""The weights of a Hugging Face folder, read tensor by tensor."""

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from milepost.storage import files


class HfFolder:
    """The safetensors of a Hugging Face folder, read tensor by tensor."""

    def __init__(self, path: str) -> None:
        self._folder = Path(path)
        index = self._folder / "model.safetensors.index.json"
        if index.exists():
            self._file_of: dict[str, str] = files.read_json(str(index))["weight_map"]
            return
        found = sorted(self._folder.glob("*.safetensors"))
        if not found:
            raise ValueError(f"model folder {path!r} has no safetensors files: convert the weights to safetensors")
        self._file_of = {name: file.name for file in found for name in _names_in(file)}

    def tensor(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise ValueError(
                f"model folder {str(self._folder)!r} has no weight {name!r}: it is not what config.json says"
            )
        with safe_open(self._folder / self._file_of[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.tensor(name)) for name in self._file_of)


def _names_in(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())

"""Put in front of SGLang's processes where there is no GPU: the operators torchvision expects of its native library.

The CPU build of torchvision beside another torch has none, and its import fails without their schemas.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _Torchvision(MetaPathFinder):
    """Declares the operators when torchvision is first looked for, so that no other process imports torch for it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda or torch.version.hip:  # its library loads there
                return
            torch.cuda.synchronize = lambda device=None: None  # SGLang's weights checker calls it on a CPU as well
            self.library = torch.library.Library("torchvision", "DEF")
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


FINDER = _Torchvision()  # named, because the library ends with what holds it
sys.meta_path.insert(0, FINDER)

"""What only a GPU makes use of, as far as a CPU can tell: the names by which SGLang knows what a trainer sends it."""

import inspect
import subprocess

from torch.multiprocessing import reductions

from milepost.engines.sglang_flags import environment
from milepost.engines.weight_checksums import GPU_HASH

SCRIPT = f"""
import pathlib, sglang
from sglang.srt.utils import common, patch_torch

patch_torch.monkey_patch_torch_reductions()
unpickler = common.SafeUnpickler(open("/dev/null", "rb"))
rebuild = unpickler.find_class("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
assert rebuild is patch_torch._rebuild_cuda_tensor_modified, rebuild
print(patch_torch._REDUCE_TENSOR_ARG_DEVICE_INDEX)
print("def gpu_tensor_hash(" in pathlib.Path(sglang.__path__[0], "{GPU_HASH}").read_text())
"""


def test_sglang_finds_the_device_where_it_is_put_and_has_its_hash_where_it_is_looked_for(
    sglang_python: str,
) -> None:
    command, seen = [sglang_python, "-c", SCRIPT], environment(gpu=False)
    done = subprocess.run(command, env=seen, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    place = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters).index("storage_device")
    assert done.stdout.split() == [str(place), "True"]

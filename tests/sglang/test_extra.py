"""The extra `sglang` goes together with what Milepost needs, by a resolver that installs nothing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_the_extra_resolves_together_with_the_base_dependencies(version: str, tmp_path: Path) -> None:
    uv = shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)
    if uv is None:
        pytest.skip("uv is not installed: pip install -e '.[dev]'")
    resolved = tmp_path / "resolved.txt"
    command = [uv, "pip", "compile", "--quiet", "--no-python-downloads", "--only-binary", ":all:", "--extra", "sglang"]
    command += ["--python-version", version, "--output-file", str(resolved), str(PROJECT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {"sglang", "torch", "megatron-core"} <= {line.split("==")[0] for line in resolved.read_text().splitlines()}

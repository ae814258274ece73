"""What importing Milepost may not do."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["train", "demo", "launch", "plan", "cli", "data", "services", "report"])
def test_importing_a_flow_does_not_import_torch(module: str) -> None:
    heavy = ["torch", "transformers", "megatron", "mlflow", "sglang"]
    code = f"import sys, milepost.flows.{module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

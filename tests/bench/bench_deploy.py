"""How long `milepost deploy` takes, and a run that is asked for on the pages until its first stage has ended.

The server is one of its own, the engines are fake. Bounds: 20 s each.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from prefect.client.orchestration import get_client

from milepost.engines.tiny_model import write_tiny_model
from milepost.engines.tokenizer import load_tokenizer, write_character_tokenizer
from milepost.flows.services import prefect_api
from milepost.storage import files, runs

MILEPOST = str(Path(sys.executable).parent / "milepost")
RECIPE = """
steps: 1
model: {path: model, context_length: 32}
data: {path: prompts.jsonl, apply_chat_template: false, rollout_batch_size: 4, n_samples_per_prompt: 2}
rollout: {max_new_tokens: 4, shards: 1}
reward: {name: exact}
algorithm: {num_steps_per_rollout: 1}
engines: {train: fake, rollout: fake}
tracking: {enabled: false}
"""


def prepare(folder: Path) -> None:
    """A model, prompts and a recipe that name each other by relative paths."""
    model = str(folder / "model")
    write_character_tokenizer(model, "0123456789+=")
    write_tiny_model(
        model, vocab_size=load_tokenizer(model).vocab_size, hidden=32, layers=2, heads=4, kv_heads=2, seed=0
    )
    rows = (f'{{"prompt": "{number}+1=", "label": "{number + 1}"}}\n' for number in range(8))
    (folder / "prompts.jsonl").write_text("".join(rows))
    (folder / "tiny.yaml").write_text(RECIPE)


def first_stage_seconds(root: Path) -> float:
    """From asking for a run to the first commit in its journal."""
    with get_client(sync_client=True) as client:
        begun = time.monotonic()
        deployment = client.read_deployment_by_name("train/tiny")
        client.create_flow_run_from_deployment(deployment.id, parameters={"run": "first"})
        journal = files.join(runs.run_folder(str(root), "first").step(0), "journal")
        while not files.names(journal):
            time.sleep(0.05)
        return time.monotonic() - begun


def main() -> None:
    with tempfile.TemporaryDirectory() as path, prefect_api(say=lambda text: None) as url:
        folder, environment = Path(path), {**os.environ, "PREFECT_API_URL": url}
        prepare(folder)
        command = [MILEPOST, "deploy", "--recipe", "tiny.yaml"]
        for name in ("first", "again"):
            begun = time.monotonic()
            subprocess.run(
                [*command, "--no-worker"], check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL
            )
            print(f"deploy, {name}: {time.monotonic() - begun:.1f} s")
        begun = time.monotonic()
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            while b"started!" not in (folder / "log").read_bytes():
                time.sleep(0.1)
            print(f"deploy, until its worker is ready: {time.monotonic() - begun:.1f} s")
            print(f"first stage: {first_stage_seconds(folder / 'runs'):.1f} s")
        finally:
            process.terminate()
            psutil.wait_procs([psutil.Process(process.pid)], timeout=60)


if __name__ == "__main__":
    main()

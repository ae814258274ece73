"""The pages as a person uses them, in a real browser: a run's form, its page, its report, its checkpoint in MLflow, and
the buttons that stop it and let it go on.

Pictures of them are kept in the folder that `MILEPOST_SCREENSHOTS` names; `docs/images` is made so.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="NO BROWSER: the pages are not tested, `apt-get install chromium`"),
]

MILEPOST = str(Path(sys.executable).parent / "milepost")
RECIPE = """# Sums on fake engines.
steps: 1
model: {path: model, context_length: 32}
data: {path: prompts.jsonl, apply_chat_template: false, rollout_batch_size: 4, n_samples_per_prompt: 2}
rollout: {max_new_tokens: 8, shards: 1}
reward: {name: "short:short"}
algorithm: {num_steps_per_rollout: 1}
checkpoint: {every_steps: 2}
eval: {path: held-out.jsonl, every_steps: 2}
engines: {train: fake, rollout: fake}
"""
REWARD = "def short(sample):\n    return 1 / len(sample.response or '.')\n"
SIZE = {"width": 1200, "height": 1000}
MLFLOW_WIDTH = 890  # without the assistant beside it


@dataclass(frozen=True)
class Site:
    """A folder in which somebody has called `milepost up` and `milepost deploy`, and what these printed."""

    folder: Path
    form: str
    mlflow: str
    pictures: Path


@pytest.fixture(scope="module")
def site(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, home = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("home")
    pictures = Path(os.environ.get("MILEPOST_SCREENSHOTS") or tmp_path_factory.mktemp("pictures"))
    pictures.mkdir(parents=True, exist_ok=True)
    (folder / "model").symlink_to(model_dir)
    rows = "".join(f'{{"prompt": "{number}+1=", "label": "{number + 1}"}}\n' for number in range(16))
    given = {"prompts.jsonl": rows, "held-out.jsonl": rows, "tiny.yaml": RECIPE, "short.py": REWARD}
    for name, text in given.items():
        (folder / name).write_text(text)
    apart = {name: value for name, value in os.environ.items() if name not in ("PREFECT_API_URL", "PREFECT_HOME")}
    environment = apart | {"MILEPOST_HOME": str(home)}
    told = subprocess.check_output([MILEPOST, "up"], cwd=folder, env=environment, text=True, timeout=120)
    command = [MILEPOST, "deploy", "--recipe", "tiny.yaml"]
    with open(folder / "log", "wb") as log:
        worker = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        form = address(wait_said(folder / "log", "started!"), "train/tiny")
        yield Site(folder, form, address(told, "mlflow"), pictures)
    finally:
        worker.terminate()
        worker.wait(90)
        subprocess.run([MILEPOST, "down"], env=environment, check=True, timeout=60, stdout=subprocess.DEVNULL)


def wait_said(log: Path, word: str) -> str:
    deadline = time.monotonic() + 120
    while word not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    return log.read_text()


def address(told: str, name: str) -> str:
    (found,) = re.findall(rf"^{name}\b.*?(http[^\s,]+)", told, re.MULTILINE)
    return str(found)


@pytest.fixture
def page(site: Site) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(120_000)  # a busy machine draws a page late
        yield page
        page.screenshot(path=site.pictures / "last.png")  # of a test that failed, where it failed
        browser.close()


def fill(page: Page, field: str, value: str) -> None:
    """Type into a field of a run form, which has its label and its help above it."""
    label = page.get_by_text(f"{field} (Optional)", exact=True)
    page.locator(".schema-form-property").filter(has=label).last.locator("input, textarea").first.fill(value)


def keep(page: Page, site: Site, name: str, width: int = SIZE["width"]) -> None:
    page.wait_for_timeout(1000)  # what moves has come to rest
    page.screenshot(path=site.pictures / f"{name}.png", clip={"x": 0, "y": 0, **SIZE, "width": width})


def start(page: Page, site: Site, run: str, **values: str) -> None:
    """Fill in the form, with parameters that are other than the recipe's, and go to the page of the run that begins."""
    page.goto(site.form)
    for field, value in {"run": run, **values}.items():
        fill(page, field, value)
    keep(page, site, f"form-{run}")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile(r"deployment/[^/]+$"))
    page.goto(f"{site.form.removesuffix('/run')}?tab=Runs")
    page.locator("a[href*='/runs/flow-run/']", has_text=run).first.click(timeout=300_000)


def until(page: Page, *states: str) -> None:
    """Wait until the page shows one of these states."""
    page.get_by_text(re.compile(f"^({'|'.join(states)})$")).first.wait_for(timeout=300_000)


def press(page: Page, button: str, confirm: str) -> None:
    """A button of the run's page, and the one of the dialogue that it opens."""
    page.get_by_role("button", name=button, exact=True).click()
    page.get_by_role("button", name=confirm, exact=True).click()


def test_a_run_is_started_on_its_form_and_followed_to_its_report_and_its_checkpoint(page: Page, site: Site) -> None:
    start(page, site, run="first", steps="4", Lr="0.001")
    until(page, "Completed", "Failed", "Crashed")
    assert page.get_by_text("Completed", exact=True).count(), (site.folder / "log").read_text()
    page.reload()  # so that the picture of the DAG shows all of it
    page.get_by_text("Artifacts", exact=True).last.click()
    page.get_by_role("link", name="markdown first-report Created").wait_for()
    keep(page, site, "run")
    page.get_by_role("link", name="markdown first-report Created").click()
    page.get_by_role("img", name="mean reward by step").wait_for()
    keep(page, site, "report")

    page.goto(f"{site.mlflow}/#/experiments/1/runs")
    page.get_by_text("Model training", exact=True).click()  # the view of runs and checkpoints
    page.get_by_role("link", name="first", exact=True).click()
    page.get_by_text("optimizer.lr", exact=True).wait_for()
    page.get_by_text("eval/held-out/mean").first.wait_for()
    keep(page, site, "mlflow-run", MLFLOW_WIDTH)
    page.get_by_role("link", name="first/step-000003").click()
    page.get_by_role("link", name="first-v4").click()
    page.get_by_text("Model ID").wait_for()
    page.get_by_text("eval/held-out/mean").first.wait_for()
    keep(page, site, "mlflow-checkpoint", MLFLOW_WIDTH)
    assert page.get_by_role("link", name="first/step-000003").count()

    record = json.loads((site.folder / "runs" / "first" / "run.json").read_text())
    assert (record["steps"], record["parameters"]["optimizer"]["lr"]) == (4, 0.001)
    assert (site.folder / "runs" / "first" / "checkpoints" / "000004").is_dir()


def steps_of(site: Site, run: str) -> int:
    return len(list((site.folder / "runs" / run / "steps").glob("*/manifest.json")))


def wait_steps(site: Site, run: str, more: int) -> None:
    wanted, deadline = steps_of(site, run) + more, time.monotonic() + 300
    while steps_of(site, run) < wanted:
        assert time.monotonic() < deadline, (site.folder / "log").read_text()
        time.sleep(0.2)


def test_a_run_is_suspended_resumed_and_cancelled_on_its_page(page: Page, site: Site) -> None:
    start(page, site, run="second", steps="100000")
    wait_steps(site, "second", more=2)
    press(page, "Suspend", "Submit")
    until(page, "Suspended")
    keep(page, site, "suspended")
    press(page, "Resume", "Submit")
    wait_steps(site, "second", more=2)
    press(page, "Cancel", "Confirm")
    until(page, "Cancelled")
    keep(page, site, "cancelled")

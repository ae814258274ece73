"""The report of a run: one page that needs nothing else, of whatever the run has."""

import re
from pathlib import Path

import pytest

from milepost.flows.artifacts import artifact_key
from milepost.flows.report import lineage_links, write_report
from milepost.flows.report_artifact import markdown, way
from milepost.flows.report_delivery import report_at_end
from milepost.flows.report_figures import figures
from milepost.flows.report_samples import ends
from milepost.flows.results import evaluations, finished
from milepost.flows.tracker import Tracker
from milepost.storage.ancestry import ancestry
from milepost.storage.runs import RunFolder

from .bench.made_run import MadeRun, make_run


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return make_run(str(tmp_path), 3)


def page_of(made: MadeRun) -> str:
    return Path(write_report(made.folder)).read_text()


def test_the_page_loads_nothing_from_anywhere(made: MadeRun) -> None:
    page = page_of(made)
    assert not re.search(r"<(script|link|img|iframe)\b", page)
    sources = re.findall(r"""(?:src|href)=["']([^"'#][^"']*)""", page)
    assert not [source for source in sources if source.startswith("http")]
    assert "@import" not in page and "url(http" not in page


def test_figures_are_drawn_in_the_pages_own_colour(made: MadeRun) -> None:
    page = page_of(made)
    assert page.count("<svg") == len(figures(made.folder, finished(made.folder), evaluations(made.folder)))
    assert "currentColor" in page and "prefers-color-scheme: dark" in page


def test_the_lineage_goes_from_the_model_to_the_newest_weights(made: MadeRun) -> None:
    kinds = [link.kind for link in lineage_links(ancestry(made.folder, 3))]
    assert kinds == ["model", "prompts", "rewards", "steps", "weights"]
    assert "made@3" in page_of(made)


def test_the_worst_and_the_best_samples_are_of_different_groups(made: MadeRun) -> None:
    shown = ends(made.folder)
    for kind in ("worst", "best"):
        groups = [sample.sample_id.rpartition("-")[0] for sample in shown if sample.kind == kind]
        assert len(groups) == len(set(groups))
    worst = [sample.reward for sample in shown if sample.kind == "worst" and sample.reward is not None]
    best = [sample.reward for sample in shown if sample.kind == "best" and sample.reward is not None]
    assert worst and best and max(worst) <= max(best)
    assert all(0 <= token.probability <= 1 for sample in shown for token in sample.tokens)


def test_what_a_model_wrote_is_text_and_not_markup(made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def texts(folder: str, ids: list[int]) -> list[str]:
        return ["<script>x</script>"] * len(ids)

    monkeypatch.setattr("milepost.flows.sample_view.token_texts", texts)
    assert "<script>x" not in page_of(made)


def test_a_run_without_a_step_has_a_page_too(tmp_path: Path) -> None:
    assert "No step has finished." in page_of(make_run(str(tmp_path), 0))


def test_a_run_has_a_key_of_its_own_in_prefect() -> None:
    assert artifact_key("demo-1", "report") == "demo-1-report"
    keys = {artifact_key(run, "report") for run in ("demo-1", "Demo-1", "demo.1", "demo_1")}
    assert len(keys) == 4 and all(re.fullmatch("[a-z0-9-]+", key) for key in keys)


def test_the_headline_of_a_run_needs_no_step(tmp_path: Path) -> None:
    shown = markdown(make_run(str(tmp_path), 0).folder)
    assert "| steps | 0 of 100 |" in shown and "No step with a reward has finished." in shown


def test_the_way_to_a_report_is_a_link_only_where_a_browser_follows_it(made: MadeRun) -> None:
    assert way(made.folder, "http://mlflow/report").startswith("[the whole report, in MLflow](http://mlflow/report)")
    alone = way(made.folder, "")
    assert "address bar" in alone and f"`file://{made.folder.report}`" in alone and "](" not in alone
    assert way(RunFolder("s3://b/runs/made", "made"), "") == "The whole report is `s3://b/runs/made/report.html`."


def test_a_report_that_cannot_be_made_does_not_take_the_place_of_how_a_run_ended(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    made.table(1, "filter-r0-s000").unlink()
    report_at_end(made.folder, Tracker(made.folder, "", None), "")
    assert "the report of run 'made' was not written: " in (told := capsys.readouterr().err)
    assert "filter-r0-s000" in told

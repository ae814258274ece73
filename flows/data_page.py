"""What a check of a prompt set found, as a terminal shows it."""

from typing import Any

from rich.console import Console

from milepost.flows.cli_options import print_rows, print_values
from milepost.flows.curve import terminal_histogram
from milepost.flows.data_check import DataReport, Found


def show(report: DataReport) -> None:
    values: dict[str, Any] = {
        "rows": report.rows,
        "malformed": report.malformed.count,
        "duplicates (all they say)": report.duplicates.count,
        "repeated (their text)": report.repeated.count,
    }
    if report.reward:
        values[f"labels that {report.reward} cannot grade"] = report.unusable_labels.count
    if report.against:
        word_for_word = f", {report.same:,} of them word for word" if report.overlap.count else ""
        values[f"also in {report.against}"] = f"{report.overlap.count:,}{word_for_word}"
    values |= {f"{name} ({report.unit})": f"{value:,.6g}" for name, value in report.lengths.items()}
    print_values(values, report.path)
    print(f"digest {report.digest}")
    if report.histogram:
        counts, edges = report.histogram["counts"], report.histogram["edges"]
        Console().print(terminal_histogram(counts, edges, f"{report.unit} of a prompt"), markup=False, highlight=False)
    for title, found in (
        ("malformed", report.malformed),
        ("labels that cannot be graded", report.unusable_labels),
        (f"also in {report.against}", report.overlap),
        ("duplicates", report.duplicates),
        ("repeated", report.repeated),
    ):
        _show_examples(title, found)


def _show_examples(title: str, found: Found) -> None:
    if not found.count:
        return
    more = "" if found.count == len(found.examples) else f", the first {len(found.examples)} of {found.count:,}"
    columns = list(found.examples[0])
    print_rows(columns, [[one[name] for name in columns] for one in found.examples], title=f"{title}{more}")

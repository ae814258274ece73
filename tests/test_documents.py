"""What README.md and docs/ say is there: commands with their flags, paths, pictures, and every parameter."""

import re
import runpy
from pathlib import Path

import pytest
import typer
from typer.exceptions import TyperException

from milepost.flows.cli import app
from milepost.storage.parameters import Parameters

from .documents import PAGES, ROOT, commands, inline

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def problem(words: list[str]) -> str:
    """Let the command line read a command, and run nothing: what it refuses."""
    command = typer.main.get_command(app)
    context = command.make_context("milepost", list(words))
    try:
        while hasattr(command, "resolve_command"):
            name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            context = command.make_context(name, rest, parent=context)
    except TyperException as error:
        return f"milepost {' '.join(words)}: {error.format_message()}"
    return ""


@pages
def test_the_command_line_knows_every_command_and_flag(page: Path) -> None:
    found = [problem(words) for command in commands(page) for words in command.milepost]
    assert [each for each in found if each] == []


def test_a_flag_that_there_is_not_is_found() -> None:
    assert "--setp" in problem(["train", "--config", "x", "--setp", "y"])
    assert "No such command" in problem(["trian"])


@pages
def test_every_command_that_prose_names_is_one(page: Path) -> None:
    assert {text.split()[1] for text in inline(page)} <= set(typer.main.get_command(app).commands)


@pages
def test_every_target_is_in_the_makefile(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = [command.words[1:] for command in commands(page) if command.program == "make"]
    assert {word for words in made for word in words if "=" not in word} <= set(targets)


@pages
def test_every_file_of_the_project_that_a_page_names_is_there(page: Path) -> None:
    words = {word for command in commands(page) for word in command.words}
    words |= set(re.findall(r"`([\w./-]+\.\w+)`", page.read_text()))
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    named = {word for word in words if "/" in word and word.partition("/")[0] in folders}
    linked = {str(page.parent / link) for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text())}
    assert [name for name in named | linked if not (ROOT / name).exists()] == []


def test_every_parameter_is_on_its_page_as_the_code_has_it() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_parameters.py"))
    assert made["PAGE"].read_text() == made["page"](), "run `python docs/make_parameters.py`"


def test_the_concepts_name_every_section() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text()
    assert [name for name in Parameters.model_fields if f"| `{name}` |" not in text] == []

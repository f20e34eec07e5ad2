"""What the README and docs tell people to type is understood, and the names they show exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

import vit
from vit.commands.main import COMMANDS, Parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ENTRY = {"train.py": "train", "predict.py": "predict"}


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every code block in `language`."""
    return [
        (page.name, text)
        for page in PAGES
        for kind, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if kind in language.split()
    ]


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every vit command in the shell blocks, as `COMMAND arguments`."""
    found = []
    for page, text in blocks("sh bash console shell"):
        for line in text.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\||;", line.split(" #")[0]):
                words = shlex.split(part.strip().removeprefix("$ "), comments=True)
                words = [w for w in words if w not in ("python", "python3") and "=" not in w[:20]]
                at = next((i for i, w in enumerate(words) if Path(w).name in (*ENTRY, "vit")), None)
                if at is None or (at and words[0] not in ("-m", "accelerate", "torchrun", "srun")):
                    continue
                name = Path(words[at]).name
                rest = words[at + 1 :]
                found.append((page, [ENTRY[name], *rest] if name in ENTRY else rest))
    return found


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda value: str(value)[:60])
def test_a_documented_command_is_understood(page, words):
    if not words or words[0] in ("--help", "--version", "COMMAND"):
        return
    assert words[0] in COMMANDS, f"{page}: vit {words[0]} is not a command"
    parser = Parser(prog=f"vit {words[0]}", exit_on_error=False)
    importlib.import_module(f"vit.commands.{words[0]}_command").add_arguments(parser)
    parser.parse(words[1:])


def test_the_readme_shows_commands():
    assert len([words for page, words in commands() if page == "README.md"]) >= 6


def test_documented_names_exist():
    used = {name for _, text in blocks("python") for name in re.findall(r"\bvit\.(\w+)", text)}
    used -= {"config", "settings", "errors", "model", "data", "training", "weights", "inference"}
    used -= {"exported"}
    assert {"Predictor", "create_model"} <= used
    assert used <= set(dir(vit)), used - set(dir(vit))


def test_the_docs_name_a_python_function_for_every_command():
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `vit (\w+).*?` \| .*`", text, re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS)


@pytest.mark.parametrize("name", vit.__all__)
def test_every_public_name_is_there(name):
    assert getattr(vit, name) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target} is not there"

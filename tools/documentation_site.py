"""What the documentation site (mkdocs.yml) has beside docs/: a hook of MkDocs.

    reference/vit-COMMAND.md   the flags of each command, from its parser
    reference/python.md        the public names of `vit`, whose docstrings mkdocstrings reads
    project/*.md               README, CHANGELOG and the like, which are outside of docs/
    source/*.md                the files of the repository that pages link to
    notebooks/*.md             the notebooks of docs/notebooks with their saved results
    llms.txt                   the pages by title, for programs that look for one

Pages keep the links that work in the repository: a link to a file outside of docs/ leads to one of
these pages.
"""

import argparse
import importlib
import json
import posixpath
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PROJECT = {
    "README.md": "project/readme.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
}
"""File of the repository -> page of the site."""
KEYWORDS = {
    "augmentation.md": ["augmentation", "mixup", "cutmix"],
    "captioning.md": ["captions", "CIDEr", "BLEU"],
    "check.md": ["duplicates", "mislabelled"],
    "cluster.md": ["GPU", "slurm", "distributed", "FSDP", "torchrun"],
    "convert.md": ["timm", "transformers", "safetensors"],
    "cpu.md": ["int8", "quantization"],
    "data.md": ["csv", "excel", "split", "groups"],
    "distillation.md": ["distillation", "teacher", "student"],
    "evaluate.md": ["accuracy", "metrics", "confidence interval", "slices"],
    "explain.md": ["attribution", "relevance map", "attention"],
    "export.md": ["onnx", "openvino", "deploy", "phone", "mobile"],
    "fine-tuning.md": [
        *("transfer learning", "lora", "probe", "freeze", "improve"),
        *("new class", "add class", "add images", "incremental"),
    ],
    "imbalance.md": ["imbalance", "rare"],
    "loading.md": ["dataloader", "workers", "cache"],
    "multilabel.md": ["multi-label"],
    "predict.md": ["predict", "inference", "embeddings"],
    "pretrain.md": ["self-supervised", "unlabelled", "mae"],
    "resume.md": ["resume", "checkpoint", "interrupted"],
    "serve.md": ["server", "http", "kubernetes", "prometheus"],
    "shards.md": ["webdataset", "tar", "parquet", "s3", "hub"],
    "start.md": ["install", "installation", "pip", "quick start"],
    "tour.md": ["transformer", "lecture", "flash attention", "course"],
    "training.md": [
        *("batch size", "learning rate", "optimizer", "hyperparameter search", "improve"),
        *("out of memory", "memory"),
    ],
    "trust.md": ["calibration", "temperature", "conformal", "unknown", "out of distribution"],
    "weights.md": ["pretrained", "download"],
}
"""Page -> words that people search for, some of which its title does not have."""
FEWER = ("glossary.md", "lab-notebook.md", "recipes.md", "project/")
"""Pages that contain almost every word, and rank lower in the search."""
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".md": "markdown", ".jsonl": "json"}
TITLES = {"positional arguments": "Arguments", "options": "Flags"}
QUOTES = "#\"' "
LLMS_NOTE = """\
Programs that run the commands begin with [agents.html](agents.html): the order of work, exit codes,
files to read, and what never to do."""
HIDDEN = "---\nsearch:\n  exclude: true\n---\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the commands into the navigation."""
    sys.path.insert(0, str(ROOT))
    from vit.commands.main import COMMANDS

    (reference,) = (each["Reference"] for each in config.nav or [] if "Reference" in each)
    (entry,) = (each for each in reference if "Commands" in each)
    pages = [{f"vit {name}": f"reference/vit-{name}.md"} for name in COMMANDS]
    entry["Commands"] = [{"All commands": "reference/commands.md"}, *pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    from vit.commands.main import COMMANDS, sentence

    def add(uri: str, text: str) -> None:
        files.append(File.generated(config, uri, content=text))

    gone = KEYWORDS.keys() - {file.src_uri for file in files}
    if gone:
        raise PluginError(f"KEYWORDS of tools/documentation_site.py: {sorted(gone)} are no pages")
    rows = "\n".join(
        f"| [vit {name}](vit-{name}.md) | {sentence(COMMANDS[name])} |" for name in COMMANDS
    )
    add("reference/commands.md", f"# Commands\n\n| command | |\n|---|---|\n{rows}\n")
    for name in COMMANDS:
        add(f"reference/vit-{name}.md", command_page(name, sentence(COMMANDS[name])))
    add("reference/python.md", python_page())
    for name, uri in PROJECT.items():
        add(uri, (ROOT / name).read_text(encoding="utf-8"))
    add("llms.txt", index_of_pages(config))
    notebooks = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
    for path in notebooks:
        add(site_uri(path), notebook_page(path))
    pages = [*(ROOT / "docs").glob("**/*.md"), *notebooks, *(ROOT / name for name in PROJECT)]
    linked = {path for page in pages for path in outside_links(page)}
    for folder in [path for path in linked if path.is_dir()]:
        linked |= {path for path in folder.iterdir() if path.suffix in LANGUAGES}
    for path in sorted(linked):
        add(source_uri(path), folder_page(path) if path.is_dir() else source_page(path))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Give the search its words, and lead links to files outside of docs/ to the pages of them."""
    uri = page.file.src_uri
    page.meta["tags"] = KEYWORDS.get(uri, [])
    if uri.startswith(FEWER):
        page.meta["search"] = {"boost": 0.3}
    origins = {made: ROOT / name for name, made in PROJECT.items()}
    origins |= {site_uri(path): path for path in (ROOT / "docs/notebooks").glob("*.ipynb")}
    origin = origins.get(uri, ROOT / "docs" / uri)
    if not origin.is_file():  # made from the code
        return markdown

    def replace(match: re.Match[str]) -> str:
        path = target(origin, match[0])
        if path is None:
            return match[0]
        return posixpath.relpath(site_uri(path), posixpath.dirname(uri) or ".")

    return LINK.sub(replace, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Fail if the theme loads a script or style from elsewhere, whatever its settings are."""
    pattern = re.compile(
        r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\s\">]+"
    )
    for path in Path(config.site_dir).rglob("*.html"):
        found = [
            each for each in pattern.findall(path.read_text("utf-8")) if "canonical" not in each
        ]
        if found:
            raise PluginError(f"{path} loads {found[0]}")


def target(page: Path, link: str) -> Path | None:
    """The file or folder of the repository that a link of a page leads to; None for others."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    path = (page.parent / link).resolve()
    return path if path.is_relative_to(ROOT) and path.exists() else None


def outside_links(page: Path) -> Iterator[Path]:
    """What a page links to that is no page of the site by itself."""
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        path = target(page, match[0])
        if path is None or path.is_relative_to(ROOT / "docs"):
            continue
        if path.relative_to(ROOT).as_posix() not in PROJECT:
            yield path


def index_of_pages(config: MkDocsConfig) -> str:
    """The pages of the navigation as a list of links by part, in the form of llmstxt.org."""

    def rows(entry: Any, title: str = "") -> Iterator[str]:
        if isinstance(entry, str):
            page = "index.html" if entry == "README.md" else entry.replace(".md", ".html")
            yield f"- [{title or 'Documentation'}]({page})"
        elif isinstance(entry, list):
            for each in entry:
                yield from rows(each)
        else:
            for name, inside in entry.items():
                yield from rows(inside, name)

    parts = [f"# {config.site_name}", f"> {config.site_description}", LLMS_NOTE]
    for part in config.nav or []:
        for title, entries in part.items():
            parts.append("\n".join([f"## {title}", "", *rows(entries)]))
    return "\n\n".join(parts) + "\n"


def site_uri(path: Path) -> str:
    """The page of a file or folder of the repository, as MkDocs names it."""
    name = path.relative_to(ROOT).as_posix()
    if name == "docs":
        return "README.md"
    if path.is_relative_to(ROOT / "docs"):
        uri = path.relative_to(ROOT / "docs").as_posix()
        return uri.replace(".ipynb", ".md")
    return PROJECT.get(name) or source_uri(path)


def source_uri(path: Path) -> str:
    """The page made of a file or folder: with another suffix, it would be a page itself."""
    return f"source/{path.relative_to(ROOT).as_posix().replace('.', '-')}.md"


def source_page(path: Path) -> str:
    """A file of the repository; Markdown as it is shown, everything else as code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return HIDDEN + text
    fence = "`" * 5
    language = LANGUAGES.get(path.suffix, "text")
    title = f"# `{path.relative_to(ROOT).as_posix()}`"
    return f"{HIDDEN}{title}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def folder_page(folder: Path) -> str:
    """The files of a folder, with the first line of each."""
    rows = []
    for path in sorted(path for path in folder.iterdir() if path.suffix in LANGUAGES):
        first = next(iter(path.read_text(encoding="utf-8").splitlines()), "")
        uri = posixpath.relpath(source_uri(path), posixpath.dirname(source_uri(folder)))
        rows.append(f"| [`{path.name}`]({uri}) | {cell(first.strip(QUOTES))} |")
    title = f"# `{folder.relative_to(ROOT).as_posix()}/`"
    return f"{HIDDEN}{title}\n\n| file | |\n|---|---|\n" + "\n".join(rows) + "\n"


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: its text, its code, and below each cell what it printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                png = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="Result of the cell" src="data:image/png;base64,{png}">')
                continue
            text = "".join(output.get("text") or data.get("text/plain", []))
            parts.append(f"```text\n{text.rstrip()}\n```")
    link = f'<a href="{path.name}" download>{path.name}</a>'
    note = f"This page is a notebook as it was executed. To run it: {link}, in Jupyter."
    return "\n\n".join([parts[0], note, *parts[1:]]) + "\n"


def command_page(name: str, sentence: str) -> str:
    """Usage, examples and flags of a command by group."""
    from vit.commands.command_parser import CommandParser

    parser = CommandParser(prog=f"vit {name}")
    importlib.import_module(f"vit.commands.{name}_command").add_arguments(parser)
    usage = parser.format_usage().removeprefix("usage: ").strip()
    lines = [f"# vit {name}", "", sentence, "", "```text", usage, "```", ""]
    if parser.examples:
        lines += ["```sh", *parser.examples, "```", ""]
    for group in parser._action_groups:
        actions = [each for each in group._group_actions if each.help != argparse.SUPPRESS]
        if actions:
            title, _, rest = (TITLES.get(str(group.title)) or str(group.title)).partition(" (")
            title, _, more = title.partition(": ")
            lines += [f"## {title[0].upper()}{title[1:]}", ""]
            if rest or more:
                lines += [cell(" ".join(filter(None, (more, f"({rest}" if rest else "")))), ""]
            lines += ["| | |", "|---|---|", *map(flag_row, actions), ""]
    return "\n".join(lines)


def flag_row(action: argparse.Action) -> str:
    """A row of a table: the names and values of a flag, and its help."""
    formatter = argparse.HelpFormatter("vit")
    flags = ", ".join(f"`{flag}`" for flag in sorted(action.option_strings, key=len))
    values = ""
    if action.nargs != 0:
        values = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    text = formatter._expand_help(action) if action.help else ""
    words = " ".join(part for part in (flags, f"`{values}`" if values else "") if part)
    return f"| {words} | {cell(text)} |"


def cell(text: str) -> str:
    """Plain text for a cell of a table; what is between backticks stays code."""
    parts = " ".join(text.split()).split("`")
    for at in range(0, len(parts), 2):
        parts[at] = re.sub(r"([|*_\\\[\]])", r"\\\1", escape(parts[at], quote=False))
    return "`".join(parts)


def python_page() -> str:
    """The public names: functions first, then classes."""
    import vit

    homes: dict[str, Any] = vit._HOMES
    parts = {
        "Functions": sorted(name for name in homes if name[0].islower()),
        "Classes": sorted(name for name in homes if name[0].isupper()),
    }
    text = "# Python\n\n```python\nimport vit\n```\n\nThese names are in the package `vit` itself. "
    text += "[Which function a command calls](../README.md#each-command-from-python).\n"
    for title, names in parts.items():
        text += f"\n## {title}\n"
        for name in names:
            text += f"\n::: {homes[name]}.{name}\n"
    return text

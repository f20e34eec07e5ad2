"""What tests of pages share: hostile names, unreadable images, and a strict reader of HTML."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from vit.config.setting_layers import make_config
from vit.evaluation.html_page import script_digest
from vit.evaluation.run_report import RunFacts

HOSTILE_NAMES = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</title></style><b>bold",
    "red\x1b[31m",
    "gpj.\u202efdp",
    "&amp;&lt;",
    "two\nlines",
    "half \udce9",
    "{{ 7 * 7 }}{% raw %}",
    "x" * 99 + "<",
)
VOID = {"meta", "img", "br"}
LOADING = {"iframe", "object", "link", "base", "form"}


class Page(HTMLParser):
    """A parsed page: elements with their attributes, and the texts between tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    @property
    def lines(self) -> str:
        """The texts, one a line."""
        return "\n".join(text.strip() for text in self.texts)

    @property
    def prose(self) -> str:
        """The texts as they follow each other."""
        return "".join(self.texts)

    def find(self, name: str) -> list[dict[str, str]]:
        """Attributes of all elements called `name`."""
        return [attributes for found, attributes in self.elements if found == name]

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        assert len(dict(attributes)) == len(attributes), f"{name} has an attribute twice"
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] not in ("style", "title") and data.strip():
            self.texts.append(re.sub(r"\s+", " ", data))


@pytest.fixture
def parse() -> Callable[[str], Page]:
    """Parse a page, and check that tags close in order and that only its script can act."""

    def parse(html: str) -> Page:
        page = Page(html)
        assert not page.open
        for name, attributes in page.elements:
            assert name not in LOADING
            assert not [key for key in attributes if key.startswith("on")]
            assert attributes.get("src", "data:").startswith("data:")
            assert re.fullmatch(r"[\w%./-]*report\.html", attributes.get("href", "report.html"))
        assert {image["src"].partition(",")[0] for image in page.find("img")} <= {
            "data:image/jpeg;base64"
        }
        assert "://" not in html
        assert not set(html) & set("\x1b\u202e\u202c\u2066\r\t\x00")
        (policy,) = (
            meta["content"]
            for meta in page.find("meta")
            if meta.get("http-equiv") == "Content-Security-Policy"
        )
        (script,) = page.scripts
        assert page.find("script") == [{}]
        assert policy == (
            "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
            f"script-src '{script_digest(script)}'"
        )
        return page

    return parse


@pytest.fixture
def hostile_names() -> tuple[str, ...]:
    """Names of classes that are markup, template code, control characters or very long."""
    return HOSTILE_NAMES


@pytest.fixture
def hostile_images(tmp_path) -> list[str]:
    """40 files whose names are markup; the first is no image."""
    paths = []
    for number in range(40):
        path = tmp_path / f"{number}<img src=x onerror=alert(1)>\x1b[31m\u202e'\".png"
        Image.new("RGB", (30 + number, 20), (6 * number, 90, 40)).save(path)
        paths.append(str(path))
    Path(paths[0]).write_bytes(b"no image")
    return paths


@pytest.fixture
def assert_harmless(parse) -> Callable[[str], Page]:
    """Parse a page with hostile names, and check that they are text and nothing else."""

    def check(html: str) -> Page:
        page = parse(html)
        assert {name for name, _ in page.elements}.isdisjoint({"i", "u", "s"})
        assert html.count("<script") == 1
        for raw in ("<script>alert", "<img src=x", "'><", "<u>", "</title></style><b>"):
            assert raw not in html
        for name in ("<script>alert(1)</script>", "red\\x1b[31m", "{{ 7 * 7 }}{% raw %}"):
            assert name in page.prose
        return page

    return check


@pytest.fixture
def make_facts(tmp_path, make_epochs) -> Callable[..., RunFacts]:
    """Make facts about a run; settings are those that differ from the defaults."""

    def make(classes, settings=None, **changes):
        facts = {
            "folder": tmp_path,
            "epochs": make_epochs(3),
            "config": make_config(
                {"data": "pets", "num_classes": len(classes), **(settings or {})}
            ),
            "classes": classes,
            "parameters": 21_700_000,
            "machine": "1 x cpu in fp32",
            "train_images": 99,
            "root": tmp_path,
            "val_held_out": True,
            "best_epoch": 1,
            "unreadable": {},
        }
        return RunFacts(**{**facts, **changes})

    return make


@pytest.fixture
def make_epochs() -> Callable[..., list[dict]]:
    """Make events of epochs, with scores of all tasks."""

    def make(count, **more):
        return [
            {
                "event": "epoch",
                "epoch": epoch,
                "train_loss": 3.0 / epoch,
                "val_loss": 2.5 / epoch,
                "val_top1": 1 - 1 / (epoch + 1),
                "val_map": 1 - 1 / (epoch + 1),
                "val_loss_shuffled": 2.75,
                "val_bleu4": 0.125 * epoch,
                "val_rouge_l": 0.25,
                "val_cider": 0.4375 * epoch,
                "val_distinct": 0.5,
                "lr": 1e-3,
                "images_per_second": 812.5,
                "seconds": 61.0,
                **more,
            }
            for epoch in range(1, count + 1)
        ]

    return make


@pytest.fixture
def make_session() -> Callable[..., dict]:
    """Make the facts about the machine and the command of a training."""

    def make(command):
        return {
            "began": "2026-01-31T12:00:00+00:00",
            "command": command,
            "directory": "/home/<i>user",
            "versions": {"vit": "0.1", "torch": "2.9"},
            "processor": "A processor",
            "cores": 8,
            "gpus": ["A GPU"],
            "system": "Linux",
            "git": {"vit": {"commit": "c0ffee", "changed": True}, "data": None},
        }

    return make

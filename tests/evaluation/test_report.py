"""The report: its numbers are right, its markup is whole, no name gets out of its place."""

import base64
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from vit.config.parser import make_config
from vit.evaluation.charts import epoch_ticks, nice_ticks
from vit.evaluation.classification_metrics import Outcomes, summarize
from vit.evaluation.classification_report import write_classification_report
from vit.evaluation.html_page import VOID, called, tag
from vit.evaluation.run_report import RunFacts

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</title></style><b>bold",
    "red\x1b[31m",
    "gpj.\u202efdp",
    "&amp;&lt;",
    "two\nlines",
    "n\udce9e",
)
IMAGES = 40


def draw(classes: int, images: int = IMAGES) -> Outcomes:
    """Outcomes that are right about half of the time."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (images,), generator=generator)
    logits = torch.randn(images, classes, generator=generator, dtype=torch.float64)
    logits[torch.arange(images), labels] += 1.0
    return Outcomes.of(logits.softmax(dim=1), labels)


def epoch_events(count: int) -> list[dict]:
    return [
        {
            "event": "epoch",
            "epoch": epoch,
            "step": 5 * epoch,
            "train_loss": 2.0 / epoch,
            "val_loss": 2.5 / epoch,
            "val_top1": 1 - 1 / (epoch + 1),
            "lr": 1e-3,
            "images_per_second": 812.5,
            "data_wait": 0.1,
            "seconds": 61.0,
        }
        for epoch in range(1, count + 1)
    ]


@pytest.fixture
def write(tmp_path):
    """Write a report about made-up answers, and return its text."""

    def write(classes, *, epochs=3, outcomes=None, paths=None, settings=None, **changes):
        outcomes = draw(len(classes)) if outcomes is None else outcomes
        facts = {
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
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        write_classification_report(
            folder,
            facts=RunFacts(**{**facts, **changes}),
            events=epoch_events(epochs),
            outcomes=outcomes,
            paths=paths or [str(tmp_path / "missing.jpg")] * len(outcomes),
        )
        return (folder / "report.html").read_text(encoding="utf-8")

    return write


class Reader(HTMLParser):
    """Tags that stand open, tags that were seen, and the text between them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []
        self.text: list[str] = []

    def handle_starttag(self, name, attributes):
        self.seen.append((name, dict(attributes)))
        assert len(dict(attributes)) == len(attributes), f"{name} has an attribute twice"
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "title"):
            self.text.append(data)


def read(page: str) -> Reader:
    """The page, parsed; fails unless every tag is closed in order, and nothing can act or load."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    for name, attributes in reader.seen:
        assert name not in ("script", "iframe", "object", "link", "base", "form", "a")
        assert not [key for key in attributes if key.startswith("on")]
        assert attributes.get("src", "data:image/jpeg;base64,").startswith(
            "data:image/jpeg;base64,"
        )
    assert "http://" not in page
    assert "https://" not in page
    return reader


@pytest.fixture
def hostile_images(tmp_path) -> list[str]:
    """Images whose names are markup, and one file that is no image."""
    paths = []
    for number in range(IMAGES):
        path = tmp_path / f"{number}<img src=x onerror=alert(1)>\x1b[31m\u202e'\".png"
        Image.new("RGB", (30 + number, 20), (6 * number, 90, 40)).save(path)
        paths.append(str(path))
    Path(paths[0]).write_bytes(b"no image")
    return paths


@pytest.mark.parametrize("count", [len(HOSTILE), 40], ids=["few classes", "many classes"])
def test_hostile_names_stay_text(write, hostile_images, count):
    classes = (*HOSTILE, *(f"class{i}" for i in range(count - len(HOSTILE))))
    page = write(
        classes,
        paths=hostile_images,
        unreadable={hostile_images[0]: "<i>damaged</i>\x1b"},
        settings={"data": "<u>pets</u>\x1b\u202e"},
    )
    reader = read(page)
    tags = {name for name, _ in reader.seen}
    assert tags.isdisjoint({"i", "u"})
    assert not set(page) & {"\x1b", "\u202e", "\r", "\t", "\x00"}
    for raw in ("<script", "<img src=x", "'><", "<u>", "</title></style><b>"):
        assert raw not in page
    text = "".join(reader.text)
    for name in ("<script>alert(1)</script>", "red\\x1b[31m", "gpj.\\u202efdp", "&amp;&lt;"):
        assert name in text
    assert sum(name == "img" for name, _ in reader.seen) > 5


def test_the_page_may_load_nothing(write):
    metas = [found for name, found in read(write(("a", "b"))).seen if name == "meta"]
    policy = next(m["content"] for m in metas if m.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_numbers_are_the_metrics(write):
    classes, outcomes = ("cat", "dog", "owl"), draw(3)
    scores = summarize(outcomes, classes)
    text = "\n".join(read(write(classes, outcomes=outcomes)).text)
    low, high = scores["top1_interval"]
    expected = [
        f"{scores['top1']:.2%}",
        f"{low:.2%} to {high:.2%}",
        f"{scores['macro_f1']:.2%}",
        f"{scores['balanced_accuracy']:.2%}",
        f"expected calibration error {scores['ece']:.4f}",
        f"{int((outcomes.ranks > 0).sum())} of {IMAGES} answers are wrong",
    ]
    for row in scores["per_class"]:
        expected += [row["label"], *(f"{row[key]:.1%}" for key in ("precision", "recall", "f1"))]
    for number in expected:
        assert number in text, number


def test_settings_that_differ_are_told_and_no_others(write):
    text = "\n".join(read(write(("a", "b"), settings={"lr": 0.25, "ema": 0.9, "depth": 12})).text)
    assert "\nlr\n0.25\n0.001\nPeak learning rate" in text
    assert "\nema\n0.9\n0.0\n" in text
    assert "\ndepth\n" not in text
    assert "\nnum_classes\n" not in text


def test_many_classes_begin_with_the_worst(write):
    classes, outcomes = tuple(f"class {i:04d}" for i in range(3000)), draw(3000, images=500)
    page = write(classes, outcomes=outcomes)
    reader = read(page)
    assert "Classes, the worst of 3,000 first" in reader.text
    assert "1,000 more are left out here: vit evaluate --json has all." in reader.text
    assert "heat" not in {found.get("class") for _, found in reader.seen}
    assert any("most frequent of" in text for text in reader.text)
    assert len(page) < 1_500_000


def test_no_mistakes_are_told_too(write):
    for size in (3, 30):
        outcomes = Outcomes.of(torch.eye(size), torch.arange(size))
        text = " ".join(read(write([f"c{i}" for i in range(size)], outcomes=outcomes)).text)
        assert f"None: all of {size} answers are right." in text


@pytest.mark.parametrize("epochs", [1, 2, 41, 600])
def test_any_number_of_epochs_is_drawn_inside_the_chart(write, epochs):
    reader = read(write(("a", "b"), epochs=epochs))
    charts = [found for name, found in reader.seen if name == "svg"]
    assert len(charts) == 2
    _, _, width, height = map(float, charts[0]["viewbox"].split())
    points = [found["points"] for name, found in reader.seen if name == "polyline"]
    assert len(points) == 3
    for pair in " ".join(points).split():
        x, y = map(float, pair.split(","))
        assert 0 <= x <= width
        assert 0 <= y <= height


def test_thumbnails_carry_pixels_and_nothing_else(write, tmp_path):
    path = tmp_path / "place.jpg"
    exif = Image.Exif()
    exif[0x010E] = "SECRET-PLACE"
    Image.new("RGB", (900, 500), (10, 200, 90)).save(path, exif=exif, comment=b"SECRET-NOTE")
    outcomes = Outcomes.of(torch.tensor([[0.9, 0.1]]), torch.tensor([1]))
    reader = read(write(("a", "b"), outcomes=outcomes, paths=[str(path)]))
    (found,) = [found for name, found in reader.seen if name == "img"]
    content = base64.b64decode(found["src"].partition(",")[2])
    assert b"SECRET" not in content
    assert (found["width"], found["height"]) == ("240", "133")
    assert found["alt"] == "b, taken for a"


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.97, 0.98), (2.3, 2.3), (0, 0), (0, 1e-7), (0.1, 5e4), (-1, 1)]
)
def test_ticks_are_few_round_and_span_the_values(low, high):
    ticks = nice_ticks(low, high)
    assert 3 <= len(ticks) <= 8
    assert ticks[0] <= low + 1e-9
    assert ticks[-1] >= high - 1e-9
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 2), (1, 8), (1, 60), (1, 1200), (5, 90)])
def test_epoch_ticks_are_few_and_have_both_ends(first, last):
    ticks = epoch_ticks(first, last)
    assert (ticks[0], ticks[-1]) == (first, last)
    assert len(ticks) <= 9
    assert ticks == sorted(set(ticks))


def test_markup_is_escaped_unless_it_was_made_here():
    assert (
        tag("b", "<i>", tag("i", "&"), title='"') == '<b title="&quot;">&lt;i&gt;<i>&amp;</i></b>'
    )
    long = "x" * 99 + "<"
    assert called(long) == f'<bdi title="{"x" * 99}&lt;">{"x" * 36} ... {"x" * 23}&lt;</bdi>'

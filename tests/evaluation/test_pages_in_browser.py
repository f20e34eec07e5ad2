"""report.html and the pages of `vit compare` and `vit runs` in Chromium, at a desk and on a phone.

A browser is found by the variable CHROME, on PATH, or where Playwright installed one.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vit.evaluation.classification_metrics import CalibratedOutcomes, Outcomes
from vit.evaluation.classification_page import write_classification_report
from vit.evaluation.paired_comparison import Disagreement, RunsComparison, compare_all_pairs
from vit.evaluation.runs_table import RunRecord, RunsTable

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.slow

COMMANDS = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")
# it must not look for updates where there is no network
FLAGS = (
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-quic", "--disable-gpu"),
)
DESK = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"}
PHONE = {
    "viewport": {"width": 390, "height": 844},
    "color_scheme": "dark",
    "is_mobile": True,
    "has_touch": True,
}
MB = 1_000_000


@dataclass
class View:
    """An open page."""

    page: "sync_api.Page"

    def sideways(self) -> int:
        """Pixels by which the page is wider than its window."""
        return self.page.evaluate(
            "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
            " - window.innerWidth"
        )


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    """Headless Chromium; the tests are skipped without one."""
    with sync_api.sync_playwright() as playwright:
        bundled = playwright.chromium.executable_path
        found = os.environ.get("CHROME") or next(filter(None, map(shutil.which, COMMANDS)), bundled)
        if not Path(found).exists():
            pytest.skip("no Chromium: install one (apt-get install chromium), or set CHROME")
        root = getattr(os, "geteuid", lambda: 1)() == 0
        browser = playwright.chromium.launch(
            executable_path=found, args=[*FLAGS], chromium_sandbox=not root
        )
        yield browser
        browser.close()


@pytest.fixture
def watched(browser) -> Iterator[Callable[..., "sync_api.Page"]]:
    """Open an address; at the end no page may have had an error, a dialog, a window, a download, or
    a request for anything but that address, what is `below` it, and data."""
    contexts, faults = [], []

    def watched(address: str, below: str = "", **options) -> "sync_api.Page":
        context = browser.new_context(**options)
        contexts.append(context)
        page, own = context.new_page(), (below or address, f"blob:{below}", "data:")
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
        page.on("popup", lambda _: faults.append("a window"))
        page.on("download", lambda _: faults.append("a download"))
        page.on(
            "request",
            lambda request: request.url.startswith(own) or faults.append(f"asks {request.url}"),
        )
        page.goto(address)
        return page

    watched.faults = faults
    yield watched
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def open_page(watched) -> Callable[..., View]:
    """Open a file."""
    return lambda path, device=DESK: View(watched(path.resolve().as_uri(), **device, offline=True))


def photograph(path: Path, seed: int) -> str:
    """An image of soft shapes with some noise, as a camera makes."""
    random, side = np.random.default_rng(seed), 300
    y, x = np.mgrid[0:side, 0:side] / side
    waves = random.uniform(2, 9, size=(3, 2)), random.uniform(0, 6, size=3)
    pixels = [np.sin(a * x + b * y + c) for (a, b), c in zip(*waves, strict=True)]
    noisy = 128 + 90 * np.stack(pixels, axis=2) + random.normal(0, 9, size=(side, side, 3))
    Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(path, quality=90)
    return str(path)


def draw(classes: int, images: int) -> tuple[Outcomes, CalibratedOutcomes]:
    """Outcomes of a classifier that takes neighbouring classes, shuffled, for each other."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(images) % classes
    place = torch.randperm(classes, generator=generator)
    distance = (place[labels].unsqueeze(1) - place).abs().double()
    noise = torch.randn(images, classes, generator=generator, dtype=torch.float64)
    logits = 1.2 * noise - 1.1 * distance.clamp(max=6)
    raw, scaled = (Outcomes.of((factor * logits).softmax(dim=1), labels) for factor in (0.6, 1.0))
    return raw, CalibratedOutcomes((0.6, 1.0), scaled, scaled)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> list[str]:
    """Sixty photographs."""
    folder = tmp_path_factory.mktemp("photographs")
    return [photograph(folder / f"IMG_{number:04d}.jpg", number) for number in range(60)]


@pytest.fixture
def write_report(tmp_path, make_facts, make_epochs, make_session, photographs):
    """Write the report of a made-up run, and return its path."""

    def write_report(classes, images, *, paths=None, settings=None) -> Path:
        outcomes, calibrated = draw(len(classes), images)
        found = paths or photographs
        data = settings["data"] if settings else "photos"
        session = make_session(f"vit train {data} --epochs 12")
        folder = tmp_path / "a run"
        folder.mkdir(exist_ok=True)
        shown = {"epochs": make_epochs(12), "environment": [session], "flops": 1_300_000_000}
        write_classification_report(
            make_facts(classes, settings, folder=folder, **shown),
            outcomes,
            calibrated=calibrated,
            paths=[found[index % len(found)] for index in range(images)],
        )
        return folder / "report.html"

    return write_report


@pytest.fixture
def write_comparison(tmp_path, photographs) -> Callable[..., Path]:
    """Write the page of a comparison with these right answers, (runs, images)."""

    def write_comparison(names, right, labels=("cat", "dog"), paths=None) -> Path:
        images = []
        for number, hits in enumerate(right.T.tolist()):
            label, other = (labels[(number + place) % len(labels)] for place in (0, 1))
            answers = [(label if hit else other, 0.6) for hit in hits]
            path = (paths or photographs)[number % len(paths or photographs)]
            if len({*hits}) == 2:
                images.append(Disagreement(path=path, label=label, answers=answers, right=hits))
        path = tmp_path / "comparison.html"
        found = RunsComparison(names, compare_all_pairs(right), images)
        path.write_text(found.page(), encoding="utf-8")
        return path

    return write_comparison


def names_of(count: int) -> list[str]:
    return [f"class {number:03d}" for number in range(count)]


on_each_device = pytest.mark.parametrize("device", [DESK, PHONE], ids=["desk", "phone"])


@pytest.mark.parametrize("count", [2, 10, 100, 1000])
@on_each_device
def test_a_report_of_any_number_of_classes_fits(write_report, open_page, count, device):
    path = write_report(names_of(count), max(300, 3 * count))
    assert path.stat().st_size < 5 * MB
    view = open_page(path, device)
    assert view.sideways() <= 0
    view.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert view.sideways() <= 0
    assert 2 <= view.page.locator("table.heat tbody tr").count() <= min(count, 100)
    assert view.page.locator("nav.contents a").count() >= 7


def column(view: View, place: int) -> list[str]:
    """Texts of a column of the table of classes."""
    rows = view.page.locator("section", has_text=re.compile("^Classes")).locator("tbody tr")
    return rows.evaluate_all(f"rows => rows.map(row => row.cells[{place}].textContent.trim())")


def test_tables_sort_by_pointer_and_by_keyboard(write_report, open_page):
    names = ["class 10", "Äpfel", "class 9", "<b>", "zebra"]
    view = open_page(write_report(names, 33))
    table = view.page.locator("section", has_text=re.compile("^Classes")).locator("table")
    by_name = table.get_by_role("button", name="class", exact=True)
    assert column(view, 0) == names
    by_name.click()
    assert column(view, 0) == ["<b>", "Äpfel", "class 9", "class 10", "zebra"]
    by_name.focus()
    view.page.keyboard.press("Enter")
    assert column(view, 0) == ["zebra", "class 10", "class 9", "Äpfel", "<b>"]
    heads = table.locator("th[aria-sort]")
    assert heads.evaluate_all("all => all.map(one => [one.textContent, one.ariaSort])") == [
        ["class", "descending"]
    ]
    view.page.keyboard.press("Tab")
    view.page.keyboard.press("Tab")
    view.page.keyboard.press("Space")
    assert heads.inner_text() == "precision"
    shares = [float(text.rstrip("%")) for text in column(view, 2)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_missing_values_are_last_in_both_directions(write_report, open_page):
    view = open_page(write_report(names_of(30), 20))
    button = view.page.get_by_role("button", name="recall")
    for _ in range(2):
        button.click()
        assert column(view, 3)[-10:] == ["-"] * 10
        assert "-" not in column(view, 3)[:20]


def test_long_tables_have_a_search_field(write_report, open_page):
    view = open_page(write_report(names_of(100), 300))
    section = view.page.locator("section", has_text=re.compile("^Classes"))
    section.get_by_role("searchbox").fill("CLASS 09")
    assert section.locator("tbody tr:visible").count() == 10
    assert section.locator("output").inner_text() == "10 of 100 rows"
    section.get_by_role("searchbox").fill("")
    assert section.locator("tbody tr:visible").count() == 100


@pytest.mark.parametrize("count", [3, 1000])
def test_cells_open_their_images(write_report, open_page, count):
    view = open_page(write_report(names_of(count), 400), PHONE)
    cell = view.page.locator("td button[popovertarget]").first
    answer = cell.get_attribute("aria-label")
    cell.tap()
    sheet = view.page.locator(".sheet:popover-open")
    assert sheet.locator("h3").inner_text() == answer.split(":")[0].replace(", taken", " taken")
    images = sheet.locator("img")
    assert 1 <= images.count() <= 8
    assert images.first.evaluate("one => one.naturalWidth") >= 96
    box = sheet.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    sheet.get_by_role("button", name="Close").tap()
    assert sheet.count() == 0


def test_the_matrix_is_used_by_keyboard(write_report, open_page):
    view = open_page(write_report(names_of(6), 300))
    page, cells = view.page, view.page.locator("table.heat button")
    focused = "document.activeElement.getAttribute('aria-label')"
    cells.first.focus()
    first = page.evaluate(focused)
    page.keyboard.press("ArrowRight")
    beside = page.evaluate(focused)
    assert beside != first
    assert beside.split(",")[0] == first.split(",")[0]
    page.keyboard.press("Enter")
    assert page.locator(".sheet:popover-open").count() == 1
    page.keyboard.press("Escape")
    assert page.locator(".sheet:popover-open").count() == 0
    assert page.evaluate(focused) == beside
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(focused) == first
    assert cells.evaluate_all("all => all.filter(one => one.tabIndex === 0).length") == 1


def test_hostile_names_do_nothing(
    write_report, write_comparison, open_page, hostile_names, hostile_images
):
    right = torch.arange(60) >= torch.tensor([[0], [30]])  # of two runs
    names = [*hostile_names, "=cmd|' /C calc'!A0", "</script><script>alert(2)</script>"]
    settings = {"data": "<script>alert(3)</script>'\"\n"}
    pages = (
        write_report(names, 300, paths=hostile_images, settings=settings),
        write_comparison(names[:2], right, names, hostile_images),
    )
    for path in pages:
        view = open_page(path)
        assert view.page.locator("script").count() == 1
        assert view.page.locator("img:not([src^='data:image/jpeg;base64,'])").count() == 0
        handlers = "Array.from(document.querySelectorAll('*')).flatMap(one => [...one.attributes])"
        assert (
            view.page.evaluate(f"{handlers}.filter(one => one.name.startsWith('on')).length") == 0
        )
        for button in view.page.locator("thead button").all():
            button.click()
        for cell in view.page.locator("td button[popovertarget]").all()[:5]:
            cell.click()
            view.page.keyboard.press("Escape")
        text = view.page.locator("body").inner_text()
        assert "<script>alert(1)</script>" in text
        assert "gpj.\\u202efdp" in text
        assert view.page.title()


def test_the_policy_refuses_scripts_that_somebody_adds(write_report, browser, tmp_path):
    html = write_report(["a", "b"], 20).read_text(encoding="utf-8")
    added = "<script>window.added = 1</script><img src=x onerror='window.added = 1'>"
    path = tmp_path / "added.html"
    path.write_text(html.replace("<main>", f"<main>{added}"), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    assert page.evaluate("window.added") is None
    assert page.locator("thead button").count() > 3
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(write_report, open_page, scheme):
    view = open_page(write_report(names_of(10), 300), {**DESK, "color_scheme": scheme})
    ratios = view.page.evaluate(CONTRASTS)
    assert len(ratios) > 100
    assert min(ratio for ratio, _ in ratios) >= 4.5, sorted(ratios)[:3]


CONTRASTS = """() => {
    const parse = colour => {
        const found = colour.match(/[\\d.]+/g).map(Number);
        return found.length === 3 ? [...found, 1] : found;
    };
    const light = ([r, g, b]) => {
        const part = [r, g, b].map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
    };
    const behind = node => {
        if (!node) return [255, 255, 255];
        const [r, g, b, a] = parse(getComputedStyle(node).backgroundColor);
        if (a === 1) return [r, g, b];
        const under = behind(node.parentElement);
        return [r, g, b].map((value, at) => a * value + (1 - a) * under[at]);
    };
    const found = [];
    const places = "p, th, td, td button, td span, h1, h2, dt, dd, figcaption, nav a, footer";
    for (const node of document.querySelectorAll(places)) {
        if (!node.checkVisibility() || !node.textContent.trim()) continue;
        const [ink, paper] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
        const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
        found.push([ratio, node.outerHTML.slice(0, 120)]);
    }
    return found;
}"""


@on_each_device
def test_the_table_of_runs_sorts_and_fits(open_page, tmp_path, device):
    records = [
        RunRecord(
            name=f"a rather long name of a group/run {number}",
            folder=tmp_path / f"run {number}",
            state="finished",
            reason="",
            changed=1e9 + number,
            settings={"data": "photos", "epochs": 9, "lr": 10.0 ** (-number % 7), "seed": number},
            parameters=10**number,
            epochs=number,
            metric="val_top1",
            score=(7 * number % 10) / 10,
            interval=(0.0, 1.0),
            seconds=60.0 * number,
            has_report=number == 3,
        )
        for number in range(10)
    ]
    path = tmp_path / "runs.html"
    path.write_text(RunsTable(tmp_path, tuple(records)).page(path), encoding="utf-8")
    view = open_page(path, device)
    assert view.sideways() <= 0
    heads = view.page.locator("thead th").all_inner_texts()
    (place,) = (place for place, head in enumerate(heads) if head.startswith("score"))
    view.page.locator("thead th").nth(place).get_by_role("button").click()
    cells = view.page.locator(f"tbody tr > :nth-child({place + 1})").all_inner_texts()
    assert cells == [f"{number * 10}.00%" for number in range(10)]
    assert view.page.get_by_role("link").count() == 1
    assert view.page.get_by_role("link").get_attribute("href") == "run%203/report.html"


@on_each_device
@pytest.mark.parametrize("count", [2, 5])
def test_the_page_of_several_runs_sorts_and_fits(write_comparison, open_page, device, count):
    random = torch.Generator().manual_seed(0)
    shares = torch.tensor([0.3, 0.5, 0.6, 0.9, 0.9])[:count, None]
    names = [f"experiments/a rather long name/{number}" for number in range(count)]
    path = write_comparison(names, torch.rand(count, 60, generator=random) < shares)
    assert path.stat().st_size < 5 * MB
    view = open_page(path, device)
    assert view.sideways() <= 0
    assert view.page.locator("img").count() > 20
    assert view.page.evaluate(
        "Array.from(document.images).every(one => one.complete && one.naturalWidth > 0)"
    )
    if count > 2:
        heads = view.page.locator("table").nth(1).locator("thead button")
        heads.filter(has_text="points").click()
        cells = view.page.locator("table").nth(1).locator("tbody tr > :nth-child(2)")
        points = [*map(float, cells.all_inner_texts())]
        assert points == sorted(points)
        assert len(points) == 10

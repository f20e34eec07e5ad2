"""The documentation site, built strictly and opened from disk in Chromium."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pages = pytest.importorskip("tests.evaluation.test_pages_in_browser")
browser = pages.browser
expect = pages.sync_api.expect
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
# what somebody types into the search -> a page that must be among the first three
SEARCHED = {
    "few images": "tutorial-few-images.html",
    "microscope": "tutorial-microscope.html",
    "imbalance": "imbalance.html",
    "accuracy": "evaluate.html",
    "onnx": "export.html",
    "batch size": "training.html",
    "resume": "resume.html",
    "temperature": "trust.html",
    "multi-label": "multilabel.html",
    "slurm": "cluster.html",
    "Predictor": "reference/python.html",
    "install": "start.html",
    "predict": "predict.html",
    "new class": "fine-tuning.html",
    "improve": "fine-tuning.html",
    "phone": "export.html",
    "out of memory": "training.html",
    "soft lookup": "tour.html",
    "linear attention": "tour.html",
    "convex hull": "tour.html",
    "interleaved": "tour.html",
    "translator": "tour.html",
}
FIRST = "li.md-search-result__item:nth-child(-n+3) a"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings_handlers.python")
    folder = tmp_path_factory.mktemp("site")
    # not --quiet, which hides warnings from --strict too
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # Material's, about its successor
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert not re.search("warning|error", run.stderr, re.IGNORECASE), run.stderr
    return folder


@pytest.fixture
def open_page(browser, site):
    """Open a page of the site; at the end nothing outside of it must have been requested."""
    contexts, faults = [], []

    def open_page(name, device):
        context = browser.new_context(**device, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        own = (site.as_uri(), "data:", "blob:")
        page.on(
            "request",
            lambda request: request.url.startswith(own) or faults.append(f"asks {request.url}"),
        )
        page.goto((site / name).as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def test_the_search_finds_pages_from_disk(open_page):
    page = open_page("index.html", pages.DESK)
    expect(page.locator("h1")).to_have_text("Documentation¶")
    field = page.locator("input.md-search__input")
    field.click()
    missing = {}
    for words, wanted in SEARCHED.items():
        field.fill(words)
        field.press("End")  # the search waits for a key
        try:
            page.locator(f'{FIRST}[href*="{wanted}"]').first.wait_for(
                state="attached", timeout=20_000
            )
        except pages.sync_api.TimeoutError:
            links = page.locator(".md-search-result__item > a").all()
            missing[words] = [link.get_attribute("href") for link in links]
    assert not missing


def test_no_page_scrolls_sideways_on_a_phone(open_page, site):
    names = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    # the page of a web server for wrong addresses, and source files, which are all alike
    names = {name for name in names if not name.startswith(("404", "source/"))}
    names.add("source/vit/training/plan_rules-py.html")
    assert len(names) > 50
    page = open_page("index.html", pages.PHONE)
    wide = {}
    for name in sorted(names):
        page.goto((site / name).as_uri(), wait_until="domcontentloaded")
        over = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        if over > 0:
            wide[name] = over
    assert not wide


def test_every_page_of_docs_is_reached_from_the_navigation(open_page, site):
    page = open_page("index.html", pages.DESK)
    links = page.locator(".md-nav a").evaluate_all("all => all.map(one => one.href)")
    reached = {link.split("#")[0].rsplit("/", 1)[1] for link in links if link}
    assert {path.stem + ".html" for path in (ROOT / "docs").glob("[a-z]*.md")} <= reached


def test_llms_txt_has_every_page_of_the_navigation(site):
    text = (site / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# Vision Transformer toolkit\n\n> ")
    linked = re.findall(r"\]\(([\w/.-]+)\)", text)
    assert {path.stem + ".html" for path in (ROOT / "docs").glob("[a-z]*.md")} <= {*linked}
    assert all((site / name).is_file() for name in linked)


def test_links_to_the_code_lead_to_its_pages(open_page):
    page = open_page("recipes.html", pages.DESK)
    page.locator('a:has-text("vit/training/plan_rules.py")').first.click()
    expect(page.locator("h1")).to_contain_text("vit/training/plan_rules.py")
    expect(page.locator("code").filter(has_text="def ").first).to_be_visible()

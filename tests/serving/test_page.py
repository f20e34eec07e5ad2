"""The page of `vit serve` in Chromium, at a desk and on a phone."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from torch import nn

from tests.conftest import save_untrained
from tests.serving.conftest import Client, running

pages = pytest.importorskip("tests.evaluation.test_pages_in_browser")
browser, watched = pages.browser, pages.watched
expect = pages.sync_api.expect
pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def server(tmp_path_factory, captioner) -> Iterator[Client]:
    def change(head: nn.Linear) -> None:
        nn.init.normal_(head.weight, std=3.0)

    folder = tmp_path_factory.mktemp("runs") / "hostile"
    save_untrained(folder, (HOSTILE, "b", "c"), "classify", change)
    with running([f"hostile={folder}", f"captions={captioner}"]) as client:
        yield client


@pytest.fixture
def open_page(watched, server):
    def open_page(device, url=server.server.url, **options):
        page = watched(url, url, **device, **options)
        expect(page.locator("#about")).to_contain_text("·")
        return page

    open_page.faults = watched.faults
    return open_page


def drop(page, names):
    """Drop files on the page."""
    page.evaluate(
        """async (names) => {
            const transfer = new DataTransfer();
            const canvas = new OffscreenCanvas(40, 30);
            canvas.getContext("2d").fillRect(0, 0, 20, 30);
            const image = await canvas.convertToBlob();
            for (const name of names) transfer.items.add(new File([image], name));
            dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, cancelable: true}));
        }""",
        names,
    )


@pytest.mark.parametrize("device", ["DESK", "PHONE"])
def test_images_become_bars_maps_and_captions(open_page, files, server, device):
    page = open_page(getattr(pages, device))
    paths = [path for path, _ in files[:3]]
    page.set_input_files("#files", paths)
    expect(page.locator(".bars li")).to_have_count(9)
    names = page.locator(".card .name").all_text_contents()
    assert sorted(names) == sorted(Path(path).name for path in paths)
    expected = {
        Path(path).name: json.loads(server.post(content).rows[0])["predictions"][0]
        for path, content in files[:3]
    }
    for card in page.locator(".card").all():
        best = expected[card.locator(".name").text_content()]
        assert card.locator(".label").first.text_content() == best["label"]
        assert card.locator(".score").first.text_content() == f"{100 * best['score']:.2f} %"
    first = page.locator(".card").first
    first.get_by_role("button", name="Why?").click()
    canvas = first.locator("canvas")
    canvas.wait_for(state="visible")
    assert canvas.evaluate("c => c.getContext('2d').getImageData(0, 0, 9, 9).data.some(Boolean)")
    first.get_by_role("button", name="image alone").click()
    assert canvas.is_hidden()
    page.select_option("#model", "captions")
    drop(page, ["dropped.png"])
    caption = page.locator(".card").first.locator(".caption")
    caption.wait_for(state="visible")
    sideways = "document.documentElement.scrollWidth - innerWidth"
    assert page.evaluate(sideways) <= 0
    page.get_by_role("button", name="Clear the history").click()
    assert page.locator(".card").count() == 0


def test_names_of_classes_and_files_are_text(open_page):
    page = open_page(pages.DESK)
    drop(page, [f"{HOSTILE}.png"])
    expect(page.locator(".bars li")).to_have_count(3)
    assert HOSTILE in page.locator(".bars .label").all_text_contents()
    assert page.locator(".name").text_content() == f"{HOSTILE}.png"
    assert page.locator(".card img").count() == 1


def test_images_chosen_before_the_models_are_known_are_sent(open_page, files):
    page = open_page(pages.DESK)
    held = []
    page.route("**/models", lambda route: held.append(route))
    page.reload()
    page.set_input_files("#files", files[0][0])
    page.wait_for_function("document.getElementById('files').value === ''")
    assert page.locator(".card").count() == 0
    for route in held:
        route.continue_()
    expect(page.locator(".bars li")).to_have_count(3)


def test_an_unreadable_image_has_its_reason(open_page, tmp_path):
    page = open_page(pages.PHONE)
    (tmp_path / "text.jpg").write_text("no image")
    page.set_input_files("#files", str(tmp_path / "text.jpg"))
    note = page.locator(".note.error")
    note.wait_for()
    assert note.text_content() == "not a readable image (text)"
    assert page.locator(".no-preview").is_visible()
    # the browser itself notes each answer of 4xx
    assert all("422" in fault for fault in open_page.faults)
    open_page.faults.clear()


def test_a_keyboard_is_enough(open_page, files):
    page = open_page(pages.DESK)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    # without the dialog of the system
    page.evaluate(
        """document.getElementById("files").addEventListener("click", (event) => {
            event.preventDefault();
            document.title = "opened";
        })"""
    )
    page.keyboard.press("Enter")
    expect(page).to_have_title("opened")
    page.set_input_files("#files", files[0][0])
    page.locator(".bars li").first.wait_for()
    assert page.locator("#live").text_content().startswith(Path(files[0][0]).name)
    page.get_by_role("button", name="Why?").focus()
    page.keyboard.press("Enter")
    page.locator(".maps button[aria-pressed=true]").wait_for()
    page.get_by_role("button", name="Remove").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "results-title"


def test_the_token_is_asked_for_and_kept_in_the_tab(browser, exported, files):
    with running([exported], token="secret") as client:
        context = browser.new_context(**pages.DESK)
        page = context.new_page()
        page.goto(client.server.url)
        page.get_by_label("This server needs a token").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#about")).to_contain_text("·")
        page.set_input_files("#files", files[0][0])
        page.locator(".bars li").first.wait_for()
        assert "Bearer TOKEN" in page.locator("#curl").text_content()
        assert "secret" not in page.content()
        page.reload()
        expect(page.locator("#about")).to_contain_text("·")
        context.close()


def test_the_map_lies_on_the_part_that_the_network_sees(open_page, tmp_path):
    Image.new("RGB", (300, 100), "white").save(tmp_path / "wide.png")
    page = open_page(pages.DESK)
    page.set_input_files("#files", str(tmp_path / "wide.png"))
    page.get_by_role("button", name="Why?").click()
    page.locator("canvas").wait_for(state="visible")
    image, canvas = page.locator(".view img").bounding_box(), page.locator("canvas").bounding_box()
    side = 0.9 * image["height"]  # the centre crop of the default preprocessing
    found = [canvas[key] for key in ("x", "y", "width", "height")]
    left, top = image["x"] + (image["width"] - side) / 2, image["y"] + (image["height"] - side) / 2
    assert found == pytest.approx([left, top, side, side], abs=1.5)

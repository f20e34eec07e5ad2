"""Pages from templates: values stay text, and images carry pixels and nothing else."""

import base64
import io
import re

import jinja2
import numpy as np
import pytest
from PIL import Image

from vit.evaluation.html_page import (
    TEMPLATES,
    read_thumbnail,
    render_page,
    script_digest,
)


def test_templates_switch_escaping_off_for_the_data_of_thumbnails_only():
    texts = [path.read_text(encoding="utf-8") for path in TEMPLATES.glob("*.j2")]
    assert len(texts) > 5
    unescaped = [line for text in texts for line in text.splitlines() if "|safe" in line]
    assert len(unescaped) == 1
    assert '<img src="{{ image.source|safe }}"' in unescaped[0]
    assert not [text for text in texts if "autoescape" in text]


def test_a_missing_value_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="rows"):
        render_page("runs_page.html.j2", heading="x", score=0.5)


@pytest.mark.parametrize("heading", ["a<b>&\x1b", "x" * 99 + "<", "'\"\u202e"])
def test_headings_are_escaped_printable_and_cut_in_the_middle(parse, heading):
    html = render_page("base.html.j2", heading=heading)
    (title,) = re.findall("<h1>(.*)</h1>", html)
    assert title in {
        "<bdi>a&lt;b&gt;&amp;\\x1b</bdi>",
        f'<bdi title="{"x" * 99}&lt;">{"x" * 36} ... {"x" * 23}&lt;</bdi>',
        "<bdi>&#39;&#34;\\u202e</bdi>",
    }
    parse(html)


def test_the_digest_of_a_script_is_that_of_the_standard():
    # the example of Content Security Policy Level 3, section 6.7.3.3
    expected = "sha256-qznLcsROx4GACP2dm0UCKCzCG+HiZ1guq6ZZDob/Tng="
    assert script_digest("alert('Hello, world.');") == expected


def test_thumbnails_carry_pixels_and_nothing_else(tmp_path):
    path = tmp_path / "place.jpg"
    exif = Image.Exif()
    exif[0x010E] = "SECRET-PLACE"
    Image.new("RGB", (900, 500), (10, 200, 90)).save(path, exif=exif, comment=b"SECRET-NOTE")
    image = read_thumbnail(str(path))
    assert (image.width, image.height, image.tiny) == (240, 133, False)
    prefix, _, data = image.source.partition(",")
    assert prefix == "data:image/jpeg;base64"
    assert base64.b64decode(data)[:2] == b"\xff\xd8"
    assert b"SECRET" not in base64.b64decode(data)
    path.write_bytes(b"no image")
    assert read_thumbnail(str(path)) is None
    assert read_thumbnail(str(tmp_path / "missing.png")) is None


@pytest.mark.parametrize("size", [240, 60])
def test_a_thumbnail_that_is_decoded_small_is_that_of_the_whole_image(tmp_path, size):
    y, x = np.mgrid[0:400, 0:900]
    pixels = np.stack([x // 4, y // 2, (x + y) // 6], axis=2).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "turned.jpg", quality=95, exif=exif)
    image = read_thumbnail(str(tmp_path / "turned.jpg"), size)
    found = Image.open(io.BytesIO(base64.b64decode(image.source.partition(",")[2])))
    expected = Image.fromarray(pixels).rotate(-90, expand=True)
    expected.thumbnail((size, size))
    assert found.size == expected.size
    difference = np.asarray(found, dtype=int) - np.asarray(expected, dtype=int)
    assert np.abs(difference).mean() < 3

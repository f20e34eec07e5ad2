"""The page of `vit suggest`: names stay text, and images are in the order of the list."""

from vit.evaluation.suggestions_page import suggestions_page


def test_hostile_names_stay_text(assert_harmless, hostile_names, hostile_images):
    rows = [(name, path, name, 0.25) for name, path in zip(hostile_names, hostile_images[1:])]  # noqa: B905
    failed = [(name, name) for name in hostile_names]
    page = assert_harmless(suggestions_page(hostile_names[0], hostile_names[:2], rows, failed))
    assert len(page.find("img")) == len(rows) > 0
    assert "(margin 0.25)" in page.prose

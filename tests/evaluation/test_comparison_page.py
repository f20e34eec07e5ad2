"""The page of `vit compare`: names stay text, and each direction has its images."""

from vit.evaluation.comparison_page import Flip, comparison_page
from vit.evaluation.paired_comparison import PairedComparison

RESULT = PairedComparison(1000, 900, 930, 10, 40)


def flips(paths, names):
    return [
        Flip(path=path, label=name, right=0.6, answer=names[0], wrong=0.5 + place / 100)
        for place, (path, name) in enumerate(zip(paths, names, strict=False))
    ]


def test_hostile_names_stay_text(assert_harmless, hostile_names, hostile_images):
    found = flips(hostile_images, hostile_names)
    page = assert_harmless(comparison_page(hostile_names[:2], RESULT, found, found[:1]))
    assert "B is better than A on 1,000 images" in page.prose
    assert len(page.find("img")) >= len(hostile_names) - 1


def test_the_surest_mistakes_come_first(parse, hostile_images):
    images = hostile_images[1:4]
    found = flips(images, ["cat", "dog", "owl"])
    page = parse(comparison_page(("old", "new"), RESULT, [], found))
    alternatives = [image["alt"].split(",")[0] for image in page.find("img")]
    assert alternatives == ["owl", "dog", "cat"]
    assert "A right, B wrong: 0 images" in page.prose
    assert "B right, A wrong: 3 images" in page.prose

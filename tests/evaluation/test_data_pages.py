"""The pages of `vit check` and `vit suggest`."""

import pytest

from vit.data.checks.check_listing import DatasetListing, ListedImage
from vit.data.checks.dataset_check import CheckReport
from vit.data.checks.image_stats import compute_stats
from vit.data.sources.dataset_problem import Problem
from vit.data.sources.dataset_spec import DatasetSpec
from vit.evaluation.data_pages import check_page, suggestions_page


@pytest.fixture
def make_report(tmp_path, hostile_images):
    """Make the report of a dataset whose first image is unreadable."""

    def make(problems, classes=("a",)):
        listed = [ListedImage(path, "<i>train", ("a",)) for path in hostile_images]
        listing = DatasetListing(tmp_path, ["<i>train"], list(classes), listed, [])
        stats = {path: compute_stats(path) for path in hostile_images[1:]}
        return CheckReport(listing, stats, problems)

    return make


def test_hostile_names_stay_text(make_report, assert_harmless, hostile_names, hostile_images):
    problems = [
        Problem("contradiction", name, tuple(hostile_images[2:4]), labels=hostile_names[:2])
        for name in hostile_names
    ]
    page = assert_harmless(check_page(make_report(problems, hostile_names)))
    assert "Training stops over the errors." in page.prose
    assert f"contradiction: {len(hostile_names)} errors" in page.texts
    assert len(page.find("img")) == 2 * len(hostile_names)
    assert "\nerrors\n11\nwarnings\n0\n" in page.lines


def test_at_most_four_images_of_a_problem_and_24_problems_of_a_kind_are_shown(
    make_report, parse, hostile_images
):
    paths = tuple(hostile_images)
    problems = [Problem("leak", "the same image", paths[:9], count=50)] * 30
    problems += [Problem("unreadable", "damaged", paths[:1]), Problem("hidden", "x", paths[1:2])]
    page = parse(check_page(make_report(problems)))
    assert "6 more are left out here: vit check --json has all." in page.texts
    assert page.prose.count(" (and 46 more)") == 24
    assert len(page.find("img")) == 24 * 3  # of 4, the first is unreadable
    assert len(page.find("figure")) == 24 * 4 + 2  # hidden files are not opened


def test_a_remedy_is_not_cut_out_of_the_middle_of_a_description(make_report, parse):
    detail = f"class a has no images; {'add some, or ' * 8}remove the folder"
    assert detail in parse(check_page(make_report([Problem("empty_class", detail)]))).prose


def test_problems_of_one_image_each_share_a_wall(make_report, parse, hostile_images):
    problems = [
        Problem("suspected_label", f"probably b, {n}", (path,), labels=("a",))
        for n, path in enumerate(hostile_images[1:4])
    ]
    page = parse(check_page(make_report(problems)))
    assert len(page.find("figure")) == 3
    assert all(f"probably b, {n}" in page.prose for n in range(3))
    assert page.html.count('class="wall"') == 1


def test_statistics_of_the_images(make_report, parse, tmp_path):
    report = make_report([])
    text = parse(check_page(report)).lines
    assert f"\n{report.listing.root.name}\n" in text
    assert "Nothing stands in the way of training." in text
    assert "\nwidth\n31 to 69, median 50\nheight\n20 to 20, median 20\n" in text
    assert "\nformats\nPNG 39\nmodes\nRGB 39\nexif rotated\n0.0%\n" in text
    (tmp_path / "birds.csv").write_text("image,label\n")
    report.listing.spec = DatasetSpec(str(tmp_path / "birds.csv"))
    report.stats.clear()
    page = parse(check_page(report))
    assert {"birds.csv", "None can be read."} <= {*page.texts}


def test_many_classes_are_cut(make_report, parse):
    page = parse(check_page(make_report([], [f"class {number}" for number in range(250)])))
    assert "50 more classes are left out here." in page.texts
    assert "class 199" in page.texts
    assert "class 200" not in page.texts


def test_hostile_names_of_suggestions_stay_text(assert_harmless, hostile_names, hostile_images):
    rows = [(name, path, name, 0.25) for name, path in zip(hostile_names, hostile_images[1:])]  # noqa: B905
    failed = [(name, name) for name in hostile_names]
    page = assert_harmless(suggestions_page(hostile_names[0], hostile_names[:2], rows, failed))
    assert len(page.find("img")) == len(rows) > 0
    assert "(margin 0.25)" in page.prose

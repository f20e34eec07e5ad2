"""Trees of classes in tables and folders, and labels that become paths."""

import numpy as np
import pytest
from PIL import Image

import vit
from vit.config.setting_layers import Settings, make_config
from vit.data.checks.check_listing import list_dataset
from vit.data.sources.dataset_spec import DatasetSpec, as_dataset_spec
from vit.data.sources.open_dataset import open_eval_split, open_splits
from vit.data.sources.taxonomy_file import read_taxonomy
from vit.errors import ConfigError, DataError
from vit.tasks.taxonomy import Taxonomy
from vit.training.plan import with_target_task

PATHS = {
    "cat": "animals/mammals/cat",
    "dog": "animals/mammals/dog",
    "mammals": "animals/mammals",
    "crow": "animals/crow",
    "oak": "oak",
}
TREE = "class,parent\ncat,mammals\ndog,mammals\nmammals,animals\ncrow,animals\noak,\n"


def image(path, number=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(abs(hash((str(path), number))) % 2**32).integers(
        0, 256, (8, 8, 3), np.uint8
    )
    Image.fromarray(pixels).save(path)


def table(folder, names, images=4):
    """A list of images of classes with these names."""
    lines = ["image,split,label"]
    for name in names:
        for number in range(images):
            file = f"{name.replace('/', '-')}-{number}.png"
            image(folder / file)
            lines.append(f"{file},{'val' if number % 2 else 'train'},{name}")
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    return folder / "list.csv"


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "tree.csv").write_text(TREE)
    return tmp_path / "tree.csv"


def classes_of(data, **settings):
    config = make_config({"data": str(data), "task": "taxonomy", **settings})
    return open_splits(Taxonomy().dataset_spec(config), val_share=0.5, seed=0).classes


def test_a_table_and_a_folder_give_the_same_paths(tree, tmp_path):
    for path in ("animals/mammals/cat", "animals/mammals/dog", "animals/crow", "oak"):
        (tmp_path / "folders" / path).mkdir(parents=True)
    expected = {**PATHS, "animals": "animals"}
    assert read_taxonomy(str(tree)) == expected
    assert read_taxonomy(str(tmp_path / "folders")) == expected


@pytest.mark.parametrize("split", ["train", ""])
def test_nested_folders_are_paths_and_belong_to_the_top_folder_elsewhere(tmp_path, split):
    for path in PATHS.values():
        for number in range(2):
            image(tmp_path / split / path / f"{number}.png")
    assert classes_of(tmp_path) == tuple(sorted(PATHS.values()))
    flat = open_splits(str(tmp_path), val_share=0.5, seed=0)
    assert flat.classes == ("animals", "oak")
    assert sum(len(x) for x in (flat.train, flat.val)) == 2 * len(PATHS)


def test_one_folder_at_the_top_is_a_level(tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            image(tmp_path / split / "animals" / name / "0.png")
    assert classes_of(tmp_path) == ("animals/cat", "animals/dog")


def test_a_list_of_paths_is_a_tree_by_itself(tmp_path, capsys):
    data = table(tmp_path, PATHS.values())
    assert classes_of(data, target=("label",)) == tuple(sorted(PATHS.values()))
    given = {"data": str(data), "target": ("label",)}
    assert with_target_task(Settings(call={**given, "task": "classify"}))["task"] == "classify"
    assert with_target_task(Settings(call=given))["task"] == "classify"  # oak has no /
    data = table(tmp_path, [one for one in PATHS.values() if one != "oak"])
    assert with_target_task(Settings(call=given))["task"] == "taxonomy"
    assert "label has paths: task=taxonomy; --task classify overrides it" in capsys.readouterr().err


def test_plain_names_become_paths_of_the_tree(tree, tmp_path, capsys):
    for name in ("cat", "dog", "crow", "mammals"):
        for number in range(2):
            image(tmp_path / "plain" / name / "more" / f"{number}.png")
    expected = tuple(sorted(PATHS[name] for name in ("cat", "dog", "crow", "mammals")))
    assert classes_of(tmp_path / "plain", taxonomy=str(tree)) == expected
    data = table(tmp_path, ["cat", "crow", "oak"])
    found = classes_of(data, taxonomy=str(tree), target=("label",))
    assert found == ("animals/crow", "animals/mammals/cat", "oak")
    given = Settings(call={"data": str(data), "taxonomy": str(tree)})
    assert with_target_task(given)["task"] == "taxonomy"
    assert "the classes have a tree: task=taxonomy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class,parent\na,b\nb,c\nc,a\n", r"tree.csv, line 2: a > b > c > a is a cycle; leave"),
        ("class,parent\na,a\n", r"line 2: a > a is a cycle"),
        ("class,parent\na,b\na,c\n", r"line 3: 'a' has the parents 'b' \(line 2\) and 'c'; keep"),
        ("class,parent\na/b,c\n", r"line 2: 'a/b' has a /, which parts levels; rename it"),
        ("class,parent\n,c\n", r"line 2: an empty class"),
        ("class,parent\na,b,c\n", r"line 2: 3 cells, but 2 in the header"),
        ("name,above\na,b\n", r"line 1: has the columns name, above; expected class and parent"),
        ("class,parent\n", r"no rows below its header; give a class and its parent in each"),
        ("", r"an empty file"),
        (None, r"cannot be read \(No such file or directory\)"),
    ],
)
def test_a_bad_table_is_one_line_with_its_place(tmp_path, text, message):
    path = tmp_path / "tree.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_taxonomy(str(path))


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(DataError, match="no folders in it; give a folder for each node"):
        read_taxonomy(str(tmp_path))
    for path in ("a/other", "b/other"):
        (tmp_path / path).mkdir(parents=True)
    with pytest.raises(DataError, match=r"b/other: .* also has a/other; give each node a name"):
        read_taxonomy(str(tmp_path))


@pytest.mark.parametrize(
    ("names", "taxonomy", "message"),
    [
        (["cat", "dgo"], True, r"list.csv, line 6: the class 'dgo' is no node of .*tree.csv; "
         r"correct it, or add it; did you mean dog"),
        (["a/b", "a//c"], False, r"list.csv, line 6: the class 'a//c' has an empty level; name it"),
    ],
)  # fmt: skip
def test_a_wrong_label_is_one_line_with_its_place(tree, tmp_path, names, taxonomy, message):
    data, given = table(tmp_path, names), {"taxonomy": str(tree)} if taxonomy else {}
    with pytest.raises(DataError, match=message):
        classes_of(data, **given)
    spec = as_dataset_spec(str(data), task="taxonomy", **given)
    listing = list_dataset(spec)
    (problem,) = [one for one in listing.problems if one.kind == "bad_label"]
    assert len(problem.images) == 4
    assert listing.classes == [PATHS["cat"] if taxonomy else "a/b"]


def test_classes_without_a_tree_are_refused(tmp_path):
    data = table(tmp_path, ["cat", "dog"])
    with pytest.raises(ConfigError, match="no class is under another"):
        vit.train(str(data), tmp_path / "run", task="taxonomy", precision="fp32")
    with pytest.raises(ConfigError, match="taxonomy"):
        vit.train(str(data), tmp_path / "run", task="classify", taxonomy="tree.csv")


def test_siblings_with_a_typo_are_named(tmp_path):
    names = {"animals/Canidae": 3, "animals/Felidae": 40, "animals/Felidea": 2, "plants/canidae": 9}
    for name, count in names.items():
        for number in range(count):
            image(tmp_path / name / f"{number}.png", number)
    spec = DatasetSpec(str(tmp_path), nested=True)
    notes = [one for one in open_splits(spec, val_share=0.2, seed=0).notes if "typo" in one]
    assert len(notes) == 1
    assert "'animals/Felidea'" in notes[0]
    assert "typo of 'animals/Felidae'" in notes[0]


def test_labels_that_a_network_lacks_keep_their_place_in_its_tree(tmp_path):
    data = table(tmp_path, ["dog", "animals/mammals/wolf", "animals/mammals", "oak"])
    classes = (PATHS["cat"], PATHS["dog"], PATHS["mammals"], PATHS["oak"])
    spec = DatasetSpec(str(data), nested=True)
    samples, notes = open_eval_split(spec, split="val", classes=classes)
    assert [one.label for one in samples] == [1, 1, 2, 2, 3, 3, -1, -1]
    assert {one.node for one in samples} == {"", "animals/mammals/wolf"}
    assert "2 images of classes that the model lacks count in its tree only" in "\n".join(notes)
    data = table(tmp_path, ["dog", "plants/rose"])
    with pytest.raises(DataError, match="classes that the model does not have: plants/rose"):
        open_eval_split(spec, split="val", classes=classes)

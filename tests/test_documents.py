"""What the README and docs tell people to type is understood, and the names they show exist."""

import contextlib
import importlib
import itertools
import json
import re
import shlex
import shutil
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
import torch
import yaml
from PIL import Image

import vit
from tests.exported.test_exported_classifier import written
from tools.code_blocks import PAGES, ROOT, read_blocks, shell_lines
from vit.commands.command_parser import CommandParser
from vit.commands.main import COMMANDS, main
from vit.config import Config
from vit.config.collect_settings import call_settings
from vit.config.setting_layers import make_config
from vit.data.sources.builtin_datasets import digits_folder

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
ENTRY = {"train.py": "train", "predict.py": "predict"}


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every code block in `language`."""
    return [(block.page, block.text) for block in read_blocks(language)]


def typed() -> list[tuple[str, list[str]]]:
    """(page, words) of every simple command of the shell or a service, without redirections."""
    found = []
    services = [
        (page, line)
        for page, text in blocks("ini")
        for line in re.findall(r"^ExecStart=(.+)", text, re.MULTILINE)
    ]
    assert services
    for page, text in [*blocks("sh"), *services]:
        for line in shell_lines(text):
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            parts: list[list[str]] = [[]]
            for word in lexer:
                if not word.strip("&|;"):
                    parts.append([])
                else:
                    parts[-1].append(word)
            for words in parts:
                kept = list(itertools.takewhile(lambda word: word.strip("<>"), words))
                while kept and re.match(r"\w+=", kept[0]):  # a variable of the environment
                    kept.pop(0)
                if kept:
                    found.append((page, kept))
    return found


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every vit command in the shell blocks, as `COMMAND arguments`."""
    found = []
    for page, words in typed():
        words = [word for word in words if word not in ("python", "python3")]
        at = next((i for i, w in enumerate(words) if Path(w).name in (*ENTRY, "vit")), None)
        if at is None or (at and words[0] not in ("-m", "accelerate", "torchrun", "srun")):
            continue
        name = Path(words[at]).name
        rest = words[at + 1 :]
        found.append((page, [ENTRY[name], *rest] if name in ENTRY else rest))
    return found


def check_pip(words: list[str]) -> None:
    """Extras of this package exist."""
    extras = re.search(r"\[project.optional-dependencies\]\n(.*?)\n\n", PROJECT, re.DOTALL)[1]
    named = re.findall(r"^(\w+) = ", extras, re.MULTILINE)
    for word in words:
        found = re.fullmatch(r"(?:vit-toolkit|\.)\[(.+)\]", word)
        assert set(found[1].split(",") if found else []) <= set(named), word


def check_python(words: list[str]) -> None:
    """A file is there; `-m` names a module that the pages use."""
    if words[0] == "-m":
        assert words[1] in ("venv", "pip", "pytest", "vit", "benchmarks"), words
    elif words[0] != "-c":
        assert (ROOT / words[0]).is_file(), words


def check_make(words: list[str]) -> None:
    """The targets are in the Makefile."""
    assert set(words) <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def check_torchrun(words: list[str]) -> None:
    """torchrun has the flags, and starts a file, or this package as a module."""
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(words)
    assert args.training_script == "vit" if args.module else args.training_script.endswith(".py")


def check_accelerate(words: list[str]) -> None:
    """`accelerate launch` has the flags."""
    from accelerate.commands.launch import launch_command_parser

    assert words[0] == "launch"
    assert launch_command_parser().parse_args(words[1:]).training_script.endswith(".py")


CHECKED = {
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
    "make": check_make,
    "torchrun": check_torchrun,
    "accelerate": check_accelerate,
}
"""Programs whose arguments are checked; those of `vit` are by its own parsers."""
OTHERS = ". chmod cp curl docker find head mv node npm openssl trap wait"
"""Programs of others, whose lines need a server, a container or the shell: not checked."""


def test_every_typed_program_is_known():
    found = {words[0].split("/")[-1] for _, words in typed()}
    assert {"vit", "pip", "torchrun", "accelerate", "curl"} <= found
    assert found <= {"vit", *CHECKED, *OTHERS.split()}


@pytest.mark.parametrize("program", CHECKED)
def test_arguments_of_other_programs_are_understood(program, capsys):
    lines = [words[1:] for _, words in typed() if words[0] == program]
    assert lines
    try:
        for words in lines:
            CHECKED[program](words)
    except SystemExit:  # of argparse
        pytest.fail(f"{program} {shlex.join(words)}: {capsys.readouterr().err}")


def test_every_block_names_its_language_and_output_is_nothing_to_type():
    kinds = "sh python text json yaml ini"
    fences = sum(page.read_text(encoding="utf-8").count("\n```") for page in PAGES)
    assert len(blocks(kinds)) == fences / 2
    starts = re.compile(rf"^\s*(?:\$ )?(?:vit ({'|'.join(COMMANDS)}) |pip install|python )", re.M)
    outputs = [text for _, text in blocks("text")]
    assert len(outputs) > 20
    for output in outputs:
        assert not starts.search(output), output


def test_data_in_blocks_can_be_read():
    for page, text in blocks("yaml"):
        assert isinstance(yaml.safe_load(text), dict), page
    for page, text in blocks("json"):
        if "..." not in text:
            assert readable_json(text), page


def readable_json(text: str) -> bool:
    """Whether a block is one JSON value, or one a line."""
    for parts in ([text], text.strip().splitlines()):
        with contextlib.suppress(ValueError):
            return bool([json.loads(part) for part in parts])
    return False


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda value: str(value)[:60])
def test_a_documented_command_is_understood(page, words):
    if not words or words[0] in ("--help", "--version", "COMMAND"):
        return
    assert words[0] in COMMANDS, f"{page}: vit {words[0]} is not a command"
    parser = CommandParser(prog=f"vit {words[0]}", exit_on_error=False)
    importlib.import_module(f"vit.commands.{words[0]}_command").add_arguments(parser)
    parser.parse(words[1:])


def test_the_readme_shows_commands():
    assert len([words for page, words in commands() if page == "README.md"]) >= 6


def test_documented_names_exist():
    used = {name for _, text in blocks("python") for name in re.findall(r"\bvit\.(\w+)", text)}
    used -= {"config", "settings", "errors", "model", "data", "training", "weights", "inference"}
    used -= {"exported", "evaluation"}
    assert {"Predictor", "create_model"} <= used
    assert used <= set(dir(vit)), used - set(dir(vit))


def test_the_docs_name_a_python_function_for_every_command():
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `vit (\w+).*?` \| .*`", text, re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS)


@pytest.mark.parametrize("name", vit.__all__)
def test_every_public_name_is_there(name):
    assert getattr(vit, name) is not None


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\\]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target} is not there"


@pytest.fixture
def photos(tiny_run, tiny_data, tmp_path, monkeypatch):
    """The working directory of the examples: photos/, holiday/, runs, and images."""
    settings = "data: photos\nimage_size: 16\npatch_size: 8\ndim: 32\ndepth: 2\nnum_heads: 2\n"
    for run in ("photos", "a", "b", "c"):
        shutil.copytree(tiny_run, tmp_path / "runs" / run)
        (tmp_path / "runs" / run / "config.yaml").write_text(settings)
    shutil.copytree(tiny_data, tmp_path / "photos")
    shutil.copytree(tiny_data / "val", tmp_path / "photos/train")
    shutil.copytree(tiny_data / "val/apple", tmp_path / "holiday")
    image = Image.open(tiny_data / "val/apple/0.png")
    for name in ("cat.jpg", "dog.jpg", "dog.png"):
        image.save(tmp_path / name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(monkeypatch):
    """Configs of all calls of `vit.train`, which ends when its settings are checked."""
    configs = []

    def train(first=None, out=None, *, resume=False, **settings):
        values = call_settings(first, settings, out=out, resume=resume)
        configs.append(values if isinstance(values, Config) else make_config(values))
        return SimpleNamespace(epoch=3, val_top1=0.5)

    monkeypatch.setitem(vit.__dict__, "train", train)
    return configs


@pytest.mark.auto_precision
def test_the_examples_of_the_package_run(photos, trained, capsys):
    """A training is checked up to its settings; everything else runs."""
    examples = [text for text in vit.__doc__.split("\n\n") if text.startswith("    ")]
    assert len(examples) == 5
    names = {"vit": vit, "torch": torch, "Image": Image}
    for example in examples:
        exec(textwrap.dedent(example), names)
    assert [config.training.time for config in trained] == ["20m", None]
    assert trained[1].finetune.method == "probe"
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "3 50.0%"
    assert out[1].startswith("cat.jpg ('")
    assert out[2].startswith("dog.png ('")
    assert 0 <= float(out[3].split()[0]) <= 1
    assert names["logits"].shape == (8, 10)
    assert names["model"].num_classes == 5


def converted_folders():
    timm = pytest.importorskip("timm")
    transformers = pytest.importorskip("transformers")
    vit.convert_model("runs/photos", "timm", "photos-timm")
    vit.convert_model("runs/photos", "huggingface", "photos-hf")
    return {"timm": timm, "transformers": transformers}


def exported_files():
    for name in ("pets.onnx", "photos.onnx"):
        written(Path(name))
    return {}


def settings_file():
    shutil.copy("runs/photos/config.yaml", "plan.yaml")
    return {}


SUPPOSED = {
    "README.md": lambda: {"images": torch.rand(1, 3, 224, 224)},
    "convert.md": converted_folders,
    "export.md": exported_files,
    "predict.md": lambda: {"uploaded": Path("cat.jpg").read_bytes()},
    "training.md": settings_file,
    "verify.md": exported_files,
}
"""What the text of a page supposes besides `photos`: makes files, and returns variables."""
ELSEWHERE = {"own-code.md", "tour.md", "training-loop.md", "tutorial-microscope.md"}
"""Pages whose Python blocks have their own test; so have those of tritonclient (tests/serving)."""
SHAPE = re.compile(r"^(\w+) = .*# \((\d+(?:, \d+)+)\)", re.MULTILINE)
SLOW = {"convert.md", "evaluate.md"}


@pytest.mark.auto_precision
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page in SLOW else ())
        for page in dict.fromkeys(page for page, _ in blocks("python"))
        if page not in ELSEWHERE
    ],
)
def test_the_python_blocks_of_a_page_run(page, photos, trained):
    """One after the other, and tensors have the shapes that comments state."""
    names = SUPPOSED[page]() if page in SUPPOSED else {}
    stated = set()
    for code in [code for of, code in blocks("python") if of == page]:
        if "tritonclient" in code:
            continue
        exec(code, names)
        for name, shape in SHAPE.findall(code):
            assert f"{tuple(names[name].shape)}" == f"({shape})", name
            stated.add(name)
    assert page != "network.md" or stated == {
        *("tokens", "paths", "maps", "memory", "first", "fifth")
    }


def test_the_docstring_of_the_package_names_each_command_that_is_a_function():
    assert len(vit.__doc__.splitlines()) < 40
    assert "vit.Predictor" in vit.__doc__
    assert {"train", "Predictor"} <= set(vit.__all__) == set(dir(vit))
    functions = vit.__doc__.split("the same name: ")[1].split(";")[0]
    described = re.findall(r"\w+", functions)
    assert {"train", "predict", "report"} <= set(described) <= set(vit.__all__) & COMMANDS.keys()


@pytest.mark.slow
@pytest.mark.auto_precision
def test_the_documented_training_loop_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loop, *parts = (text for page, text in blocks("python") if page == "training-loop.md")
    names: dict = {}
    exec(loop, names)
    epochs = capsys.readouterr().out.splitlines()
    assert epochs[0].startswith("epoch 1  top-1 ")
    assert names["right"] > 0.2 * len(names["splits"].val)  # of ten classes
    assert 1 <= names["balance"].item() < 2  # experts are used, and evenly
    routers = [name for name in names["model"].state_dict() if "router" in name]
    assert routers
    assert vit.from_pretrained("runs/own", notify=lambda _: None).num_classes == 10
    before = {name: tensor.clone() for name, tensor in names["model"].state_dict().items()}
    for code in parts:
        exec(code, names)
    torch.testing.assert_close(names["model"].state_dict(), before, rtol=0, atol=0)
    assert (names["first_epoch"], names["done"]) == (4, 0)
    network, images = names["network"], torch.rand(1, 3, 32, 32)
    plain = vit.create_model("vit_tiny_patch16_224", image_size=32, patch_size=8, depth=2)
    plain.load_state_dict(network.state_dict())  # the names of parameters are the same
    found, expected = network.eval().features(images), plain.eval().features(images)
    assert not torch.allclose(found, expected)


@pytest.mark.slow
@pytest.mark.auto_precision
def test_what_the_first_page_says_to_type_leads_to_a_model(tmp_path, monkeypatch, capfd):
    """Its commands, with images of the digits, and one epoch of a tiny network for the time."""
    monkeypatch.chdir(tmp_path)
    tiny = "--image-size 16 --patch-size 8 --dim 32 --depth 2 --num-heads 2 --epochs 1"
    for folder in (digits_folder() / "train").iterdir():
        for file in sorted(folder.iterdir())[:12]:
            image = Image.open(file).resize((64, 64))
            for target in (f"photos/{folder.name}", "new-images"):
                (tmp_path / target).mkdir(parents=True, exist_ok=True)
                image.save(tmp_path / target / f"{folder.name}{file.stem}.png")
            image.save(tmp_path / "cat.jpg")
            image.save(tmp_path / "dog.jpg")
    typed = [words for page, words in commands() if page == "start.md"]
    assert " ".join(words[0] for words in typed) == "demo check train train predict predict"
    for words in typed:
        if words[0] == "demo" or "auto:500MB" in words:  # tested elsewhere; needs a network
            continue
        at = words.index("--time") if "--time" in words else len(words)
        code = main([*words[:at], *(tiny.split() if at < len(words) else [])])
        assert code == 0, capfd.readouterr().err
    assert (tmp_path / "runs/photos/report.html").is_file()
    assert len((tmp_path / "labels.csv").read_text().splitlines()) == 1 + 120
    (code,) = (text for page, text in blocks("python") if page == "start.md")
    capfd.readouterr()
    exec(code, {})
    assert capfd.readouterr().out.startswith("cat.jpg ")


TINY = "--image-size 16 --patch-size 8 --dim 32 --depth 2 --num-heads 2 --epochs 1"
TUTORIALS = {
    "tutorial-imbalance.md": ["runs/plain", "runs/balanced", "runs/labels", "labels-new.csv"],
    "tutorial-captions.md": ["runs/captions", "captions-new.csv"],
    "tutorial-cluster.md": ["runs/rehearsal", "shards", "runs/photos"],
    "tutorial-microscope.md": ["runs/two", "answers.csv", "maps", "check.html"],
}
"""What following each tutorial leaves in the folder of one's own images."""


def own_images(folder: Path) -> None:
    """photos/, a list of several labels and one of captions: a dozen digits of each class."""
    labels, captions = ["image,labels"], ["image,caption"]
    for source in sorted((digits_folder() / "train").iterdir()):
        for at, file in enumerate(sorted(source.iterdir())[:12]):
            name = f"photos/{source.name}/{file.name}"
            new = [f"new-images/{file.name}", f"new-labelled/{source.name}/{at % 6}.png"]
            for target in (name, *new):
                (folder / target).parent.mkdir(parents=True, exist_ok=True)
                side = 36 if "labelled" in target else 32  # images that no training has seen
                Image.open(file).resize((side, side)).save(folder / target)
            labels.append(f"{name},{'' if at == 0 else source.name + '|' + 'odd' * (at % 2)}")
            captions.append(f"{source.name}/{file.name},the digit {source.name} by hand")
        stains_of_cells(folder, source.name, len(captions))
    (folder / "labels.csv").write_text("\n".join(labels))
    (folder / "captions.csv").write_text("\n".join(captions))


def stains_of_cells(folder: Path, name: str, seed: int) -> None:
    """Fields of view in four stains, an OME-TIFF each: two treatments on three plates."""
    random = np.random.default_rng(seed)
    stains = {"axes": "CYX", "Channel": {"Name": ["dapi", "actin", "tubulin", "er"]}}
    for treatment, plate in itertools.product(("control", "treated"), range(1, 4)):
        for part in (f"cells/{treatment}", "new-cells"):
            (folder / part).mkdir(parents=True, exist_ok=True)
            values = random.integers(100, 4000, (4, 32, 32), dtype=np.uint16)
            file = folder / part / f"plate{plate}_{treatment}{name}.ome.tif"
            tifffile.imwrite(file, values, ome=True, metadata=stains)
            np.save(folder / "field.npy", np.moveaxis(values, 0, 2))


@pytest.mark.slow
@pytest.mark.auto_precision
@pytest.mark.parametrize("tutorial", TUTORIALS)
def test_what_a_tutorial_says_to_type_runs(tutorial, tmp_path, monkeypatch, capfd):
    """Its commands, with one epoch of a tiny network for the time; without downloads and GPUs."""
    own_images(tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in [words for page, words in commands() if page == tutorial]:
        downloads = any(word.startswith("timm/") for word in words)
        if downloads or words[0] == "serve" or "shapes" in words:
            continue
        if words[0] == "train" and words[-1] != "--resume":
            words = ["--task" if word == "-c" else word for word in words]  # the recipe is larger
            words = ["caption" if word.endswith(".yaml") else word for word in words]
            at = words.index("--time") if "--time" in words else len(words)
            words = [*words[:at], *words[at + 2 :], *TINY.split()]
        if words[0] == "plan":
            words += ["--device", "cpu"]
        assert main(words) in (0, 1), capfd.readouterr().err  # 1: vit check has warnings
    for code in [code for page, code in blocks("python") if page == tutorial and page in ELSEWHERE]:
        exec(code, {})
    assert all((tmp_path / name).exists() for name in TUTORIALS[tutorial])

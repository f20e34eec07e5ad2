"""The shape of the code base: who imports whom, and what importing costs."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVEL_0 = {"vit.config", "vit.errors", "vit.paths", "vit.text", "vit.version"}
LEVEL_1 = {"vit.model", "vit.data", "vit.precision"}
LEVEL_2 = {
    *("vit.weights", "vit.evaluation", "vit.tasks", "vit.generation"),
    *("vit.exported", "vit.output"),
}
LEVEL_3 = {"vit.training", "vit.inference", "vit.export"}
NUMERIC = {"torch", "numpy"}

# part -> what it may import, besides the standard library and itself
ALLOWED = {
    "vit.errors": set(),
    "vit.version": set(),
    "vit.paths": {"vit.errors"},
    "vit.text": {"vit.errors"},
    "vit.config": {"yaml", *LEVEL_0},
    "vit.precision": {"torch", "vit.errors"},
    "vit.model": {"torch", "einops", *LEVEL_0},
    "vit.data": {
        *NUMERIC, "torchvision", "PIL", "einops", "simplejpeg", "tokenizers",
        "datasets", "fsspec", "pyarrow", *LEVEL_0,
    },
    "vit.weights": {
        *NUMERIC, "safetensors", "timm", "torchvision", "transformers", "huggingface_hub", "einops",
        "PIL", "yaml", *LEVEL_0, *LEVEL_1,
    },
    "vit.generation": {"torch", "einops", *LEVEL_0, "vit.model", "vit.data.captions.tokenizer"},
    "vit.evaluation": {*NUMERIC, "sacrebleu", *LEVEL_0, *LEVEL_1, "vit.weights"},
    "vit.tasks": {*NUMERIC, *LEVEL_0, *LEVEL_1, "vit.evaluation", "vit.generation"},
    "vit.training": {
        *NUMERIC, "accelerate", "timm", "tqdm", *LEVEL_0, *LEVEL_1, *LEVEL_2,
    },
    "vit.exported": {
        "numpy", "PIL", "onnxruntime", "openvino",
        *LEVEL_0, "vit.data", "vit.generation.caption", "vit.output",
    },
    "vit.output": {"numpy", "PIL", "pyarrow", *LEVEL_0, "vit.data", "vit.generation.caption"},
    "vit.inference": {
        *NUMERIC, "PIL", "accelerate", "einops", "fsspec", "pyarrow", "ray",
        *LEVEL_0, *LEVEL_1, *LEVEL_2,
    },
    "vit.export": {
        *NUMERIC, "PIL", "einops", "onnx", "onnxruntime", "onnxscript", "openvino",
        *LEVEL_0, *LEVEL_1, *LEVEL_2, "vit.inference",
    },
    "vit.commands": {*NUMERIC, "psutil", "tqdm", *LEVEL_0, *LEVEL_1, *LEVEL_2, *LEVEL_3},
}  # fmt: skip
# sub-package -> the sub-packages beside it that it may import, also inside functions
SUBPACKAGES: dict[str, set[str]] = {
    "vit.data.captions": set(),
    "vit.data.sources": set(),
    "vit.data.checks": {"vit.data.sources"},
    "vit.weights.formats": set(),
    "vit.training.distributed": set(),
    "vit.training.logging": {"vit.training.distributed"},
    "vit.training.finetune": {"vit.training.distributed", "vit.training.logging"},
    "vit.training.checkpoint": {
        "vit.training.distributed",
        "vit.training.finetune",
        "vit.training.logging",
    },
    "vit.training.autotune": {"vit.training.distributed", "vit.training.logging"},
}
# a sub-package that imports modules of its package which import it
ENTANGLED = {"vit.weights.formats"}
# a library that only these files of a part may import
ONLY = {
    "timm": {"vit/weights", "vit/training/optimizers.py"},
    "accelerate": {"vit/training", "vit/inference/process_group.py"},
    "datasets": {"vit/data/sources/huggingface_datasets.py"},
    "fsspec": {"vit/inference/remote_files.py", "vit/data/sources/remote_shards.py"},
    "huggingface_hub": {"vit/weights/hub.py"},
    "onnx": {"vit/export/onnx_graph.py"},
    "onnxruntime": {"vit/exported/onnx_session.py", "vit/export/float16.py"},
    "onnxscript": {"vit/export/onnx_graph.py"},
    "pyarrow": {
        "vit/data/archives.py",
        "vit/data/sources/huggingface_datasets.py",
        "vit/output/embeddings_file.py",
        "vit/inference/ray_inference.py",
        "vit/inference/remote_files.py",
    },
    "ray": {"vit/inference/ray_inference.py"},
    "openvino": {"vit/export/export_openvino.py", "vit/exported/openvino_session.py"},
    "simplejpeg": {"vit/data/image_io.py"},
    "sacrebleu": {"vit/evaluation/caption_metrics.py"},
    "tokenizers": {"vit/data/captions/tokenizer.py"},
    "transformers": {"vit/weights/parity_check.py", "vit/weights/formats/huggingface_classes.py"},
}
BLOCKS = {
    *("PreNormBlock", "PostNormBlock", "SandwichNormBlock", "ParallelBlock"),
    *("PreNormDecoderBlock", "PostNormDecoderBlock"),
}


def files(part: str) -> list[Path]:
    """The module or the folder of modules called `part`; never empty."""
    path = ROOT / part.replace(".", "/")
    found = sorted(path.rglob("*.py")) or [path.with_suffix(".py")]
    assert all(file.exists() for file in found), f"{part} is gone; update ALLOWED"
    return found


@cache
def imports(file: Path) -> set[str]:
    """Dotted names of every module that `file` imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, parts: set[str]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_only_point_down(part):
    for file in files(part):
        for name in imports(file):
            known = name.split(".")[0] in sys.stdlib_module_names
            assert known or within(name, ALLOWED[part] | {part}), (
                f"{file.relative_to(ROOT)} must not import {name}"
            )


def module_name(file: Path) -> str:
    """`vit.data.sampler` of vit/data/sampler.py, `vit.data` of vit/data/__init__.py."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("part", SUBPACKAGES)
def test_a_subpackage_imports_only_the_listed_ones_beside_it(part):
    package = part.rpartition(".")[0]
    forbidden = {other for other in SUBPACKAGES if other.startswith(package)}
    forbidden -= SUBPACKAGES[part] | {part}
    for file in files(part):
        wrong = sorted(name for name in imports(file) if within(name, forbidden))
        assert not wrong, f"{file.relative_to(ROOT)} must not import {wrong}"


def test_every_subpackage_is_listed():
    found = {module_name(path) for path in (ROOT / "vit").glob("*/*/__init__.py")}
    assert found == SUBPACKAGES.keys()


def imports_when_imported() -> dict[str, set[str]]:
    """The modules of vit that each module imports at its top; a function may import later."""
    modules = {module_name(file): file for file in sorted((ROOT / "vit").rglob("*.py"))}
    found = {}
    for module, file in modules.items():
        names = {
            f"{node.module}.{alias.name}"
            for node in ast.parse(file.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        found[module] = {
            name if name in modules else name.rpartition(".")[0] for name in names
        } & modules.keys()
    assert len(found) > 100
    return found


def cycle(needs: dict[str, set[str]]) -> list[str]:
    """What is on, or above, a circle of imports; empty without one."""
    left = dict(needs)
    while free := [name for name, others in left.items() if not others & left.keys() - {name}]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_module_imports_itself_over_others():
    assert not cycle(imports_when_imported())


def test_no_subpackage_imports_itself_over_others():
    """As for modules, with each sub-package as one."""

    def owner(module: str) -> str:
        part = next((part for part in SUBPACKAGES if within(module, {part})), module)
        return module if part in ENTANGLED else part

    needs: dict[str, set[str]] = {}
    for module, others in imports_when_imported().items():
        needs.setdefault(owner(module), set()).update(map(owner, others))
    assert not cycle(needs)


def test_file_names_are_unique_and_stand_in_the_glossary():
    stems = [file.stem for file in (ROOT / "vit").rglob("*.py") if not file.stem.startswith("__")]
    assert len(stems) == len(set(stems)), [stem for stem in set(stems) if stems.count(stem) > 1]
    glossary = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| `(\w+)` \| \S", glossary, re.MULTILINE)
    assert sorted(terms) == sorted(stems)


def test_every_part_of_the_package_has_its_rule():
    parts = {f"vit.{path.stem}" for path in (ROOT / "vit").iterdir() if path.stem[0] != "_"}
    assert parts - {"vit.py"} == set(ALLOWED)


@pytest.mark.parametrize("library", ONLY)
def test_a_library_has_one_address(library):
    for file in sorted((ROOT / "vit").rglob("*.py")):
        if any(within(name, {library}) for name in imports(file)):
            here = file.relative_to(ROOT).as_posix()
            assert any(here.startswith(home) for home in ONLY[library]), f"{library} in {here}"


def test_a_block_has_no_ifs():
    tree = ast.parse((ROOT / "vit/model/blocks.py").read_text(encoding="utf-8"))
    forwards = [
        function
        for kind in ast.walk(tree)
        if isinstance(kind, ast.ClassDef) and kind.name in BLOCKS
        for function in kind.body
        if isinstance(function, ast.FunctionDef) and function.name == "forward"
    ]
    assert len(forwards) == len(BLOCKS)
    for forward in forwards:
        assert not any(isinstance(node, ast.If | ast.IfExp) for node in ast.walk(forward))


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["train", "--epohcs", "3"]])
def test_help_and_wrong_flags_need_no_torch(words):
    code = (
        "import sys; from vit.commands.main import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'timm', 'torchvision', 'accelerate', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy; sys.exit(code)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == (2 if "--epohcs" in words else 0), run.stderr

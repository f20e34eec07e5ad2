"""The shape of the code base: who imports whom, and what importing costs."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.slow_cases import mostly_slow
from vit.config.training_config import TASKS

ROOT = Path(__file__).parent.parent
LEVEL_0 = {
    f"vit.{name}"
    for name in (
        *("atomic_files", "config", "errors", "event_log", "process_resources", "timing"),
        *("calibration_reference", "class_tree", "json_reader"),
        *("number_answers", "paths", "quick_imports", "score_calibration", "stop_signals"),
        *("text", "version"),
    )
}
LEVEL_1 = {
    *("vit.model", "vit.precision"),
    *("vit.data", "vit.data.captions", "vit.data.sources", "vit.data.checks"),
}
LEVEL_2 = {
    *("vit.weights", "vit.weights.formats", "vit.evaluation", "vit.tasks"),
    *("vit.generation", "vit.exported", "vit.output"),
}
TRAINING = {f"vit.training.{name}" for name in ("checkpoint", "distributed", "finetune", "logging")}
LEVEL_3 = {"vit.training", *TRAINING, "vit.inference", "vit.export", "vit.serving"}
NUMERIC = {"torch", "numpy"}

# package or module of vit/ -> what it may import, besides the standard library and itself.
# A sub-package has a rule of its own: it is no part of the package around it. A rule may name a
# single module of another package.
ALLOWED = {
    "vit.atomic_files": {"vit.errors", "vit.text"},
    "vit.timing": set(),
    "vit.process_resources": set(),
    "vit.errors": {"vit.text"},
    "vit.event_log": {"vit.text"},
    "vit.version": set(),
    "vit.quick_imports": {"vit.errors"},
    "vit.json_reader": {"vit.errors"},
    "vit.number_answers": {"numpy", "vit.config", "vit.errors"},
    "vit.class_tree": {"numpy"},
    "vit.score_calibration": {"vit.class_tree", "vit.config", "vit.errors"},
    "vit.paths": {"vit.errors", "vit.text"},
    "vit.calibration_reference": {
        *("numpy", "vit.atomic_files", "vit.config", "vit.errors"),
        *("vit.json_reader", "vit.score_calibration"),
    },
    "vit.stop_signals": {"vit.errors"},
    "vit.text": set(),
    "vit.config": {"yaml", *LEVEL_0},
    "vit.precision": {"torch", "vit.errors"},
    "vit.model": {"torch", "einops", *LEVEL_0},
    "vit.data.captions": {"numpy", "torch", "tokenizers", *LEVEL_0},
    "vit.data": {
        *NUMERIC, "torchvision", "PIL", "einops", "openpyxl", "pillow_heif", "simplejpeg",
        "pyarrow", "pydicom", "tifffile", *LEVEL_0, "vit.data.captions",
    },
    "vit.data.sources": {
        *NUMERIC, "PIL", "datasets", "pyarrow", *LEVEL_0,
        "vit.data", "vit.data.captions",
    },
    "vit.data.checks": {
        *NUMERIC, "PIL", *LEVEL_0, "vit.data", "vit.data.captions", "vit.data.sources",
    },
    "vit.weights.formats": {
        *NUMERIC, "timm", "torchvision", "transformers", "einops", *LEVEL_0, *LEVEL_1,
    },
    "vit.weights": {
        *NUMERIC, "safetensors", "transformers", "timm", "huggingface_hub", "einops", "PIL", "yaml",
        *LEVEL_0, *LEVEL_1, "vit.weights.formats",
    },
    "vit.generation": {
        *("torch", "einops", "vit.model", "vit.precision", "vit.data.captions.tokenizer"), *LEVEL_0,
    },
    "vit.evaluation": {*NUMERIC, "jinja2", "sacrebleu", *LEVEL_0, *LEVEL_1, "vit.weights"},
    "vit.tasks": {
        *NUMERIC, *LEVEL_0, *LEVEL_1, "vit.evaluation", "vit.generation",
        "vit.output", "vit.weights",
    },
    "vit.training.distributed": {"torch", "accelerate", *LEVEL_0, "vit.precision"},
    "vit.training.logging": {
        *NUMERIC, "accelerate", "tqdm", *LEVEL_0, *LEVEL_1, *LEVEL_2, "vit.training.distributed",
        *("vit.training.lr_schedule", "vit.training.moe_losses"),
        *("vit.training.training_context", "vit.training.validation"),
    },
    "vit.training.finetune": {
        *NUMERIC, "accelerate", "tqdm", *LEVEL_0, *LEVEL_1, *LEVEL_2,
        "vit.training.distributed", "vit.training.logging", "vit.training.training_context",
    },
    "vit.training.checkpoint": {
        *NUMERIC, "accelerate", *LEVEL_0, *LEVEL_1, *LEVEL_2,
        *("vit.training.distributed", "vit.training.finetune", "vit.training.logging"),
        *("vit.training.ema", "vit.training.training_context", "vit.training.validation"),
    },
    "vit.training": {
        *NUMERIC, "accelerate", "psutil", "timm", "tqdm", *LEVEL_0, *LEVEL_1, *LEVEL_2, *TRAINING,
    },
    "vit.exported": {
        "numpy", "PIL", "onnxruntime", "openvino",
        *LEVEL_0, "vit.data", "vit.data.captions", "vit.generation.generation_config", "vit.output",
    },
    "vit.output": {
        "numpy", "PIL", *LEVEL_0, "vit.data", "vit.generation.generation_config",
    },
    "vit.inference": {
        *NUMERIC, "PIL", "accelerate", "einops", "fsspec", "psutil", "pyarrow", "ray",
        *LEVEL_0, *LEVEL_1, *LEVEL_2,
    },
    "vit.export": {
        *NUMERIC, "PIL", "einops", "onnx", "onnxruntime", "onnxscript", "openvino",
        *LEVEL_0, *LEVEL_1, *LEVEL_2, "vit.inference",
    },
    "vit.serving": {
        *NUMERIC, "starlette", "uvicorn", "python_multipart", "prometheus_client", "ray",
        *LEVEL_0, "vit.data", "vit.exported", "vit.generation", "vit.output", "vit.inference",
    },
    "vit.commands": {*NUMERIC, "psutil", "tqdm", *LEVEL_0, *LEVEL_1, *LEVEL_2, *LEVEL_3},
}  # fmt: skip
# a library that only these files of a part may import
ONLY = {
    "timm": {"vit/weights", "vit/training/optimizers.py"},
    "accelerate": {"vit/training", "vit/inference/prediction_job.py"},
    "datasets": {"vit/data/sources/huggingface_datasets.py"},
    "difflib": {"vit/text.py"},
    "fsspec": {"vit/inference/ray_inference.py"},
    "huggingface_hub": {"vit/weights/hub.py"},
    "onnx": {"vit/export/onnx_tracing.py"},
    "onnxruntime": {"vit/exported/onnx_session.py", "vit/export/float16.py"},
    "onnxscript": {"vit/export/onnx_tracing.py"},
    "openpyxl": {"vit/data/workbook.py"},
    "pillow_heif": {"vit/data/image_io.py"},
    "pydicom": {"vit/data/instrument_images.py"},
    "tifffile": {"vit/data/instrument_images.py"},
    "pyarrow": {
        "vit/data/image_archives.py",
        "vit/data/sources/huggingface_datasets.py",
        "vit/output/resumable_output.py",
        "vit/inference/ray_inference.py",
    },
    "prometheus_client": {"vit/serving/server_metrics.py"},
    "python_multipart": {"vit/serving/request_body.py"},
    "ray": {"vit/inference/ray_inference.py", "vit/serving/ray_deployment.py"},
    "starlette": {"vit/serving/application.py"},
    "uvicorn": {"vit/serving/http_server.py"},
    "openvino": {"vit/export/export_openvino.py", "vit/exported/openvino_session.py"},
    "simplejpeg": {"vit/data/image_io.py"},
    "jinja2": {"vit/evaluation/html_page.py"},
    "sacrebleu": {"vit/evaluation/caption_metrics.py"},
    "tokenizers": {"vit/data/captions/tokenizer.py"},
    "transformers": {"vit/weights/convert.py", "vit/weights/formats/huggingface_classes.py"},
}
BLOCKS = {
    *("PreNormBlock", "PostNormBlock", "SandwichNormBlock", "ParallelBlock"),
    *("PreNormDecoderBlock", "PostNormDecoderBlock"),
}


def module_name(file: Path) -> str:
    """`vit.data.sampler` of vit/data/sampler.py, `vit.data` of vit/data/__init__.py."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in sorted((ROOT / "vit").rglob("*.py"))}
FILES = {file.relative_to(ROOT / "vit").as_posix(): file for file in MODULES.values()}


@cache
def part_of(name: str) -> str:
    """The package or module with a rule that the dotted `name` belongs to; "" if there is none."""
    return max((part for part in ALLOWED if within(name, {part})), key=len, default="")


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports(file: Path) -> set[str]:
    """Dotted names of every module that `file` imports, at any depth."""
    found = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, parts: set[str]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


def is_allowed(name: str, part: str) -> bool:
    """Whether modules of `part` may import `name`; a sub-package needs a line of its own."""
    owner, allowed = part_of(name), ALLOWED[part]
    if not owner:
        return name.split(".")[0] in sys.stdlib_module_names or within(name, allowed)
    single_modules = allowed - ALLOWED.keys()
    return owner == part or owner in allowed or within(name, single_modules)


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_only_point_down(part):
    files = [file for module, file in MODULES.items() if part_of(module) == part]
    assert files, f"{part} is gone; update ALLOWED"
    for file in files:
        for name in imports(file):
            assert is_allowed(name, part), f"{file.relative_to(ROOT)} must not import {name}"


def test_no_packages_import_each_other():
    """Inside functions neither. Where rules name modules of a package, each module is a node."""
    rules = set().union(*ALLOWED.values())
    by_module = {part_of(name) for name in (rules & MODULES.keys()) - ALLOWED.keys()}
    assert by_module == {"vit.data.captions", "vit.generation", "vit.training"}

    def node(name: str) -> str:
        part = part_of(name)
        if part not in by_module:
            return part
        return name if name in MODULES else name.rpartition(".")[0]

    below: dict[str, set[str]] = {}
    for module, file in MODULES.items():
        needs = {node(name) for name in imports(file)} - {node(module), ""}
        below.setdefault(node(module), set()).update(needs)
    del below[""]  # vit/__init__.py and __main__.py import from everywhere
    assert below["vit.weights"] >= {"vit.weights.formats", "vit.model"}
    TopologicalSorter(below).prepare()  # raises CycleError with the names of the packages


def test_no_module_imports_itself_over_others():
    """Of what modules import when they are imported; a function may import later."""
    left = {}
    for module, file in MODULES.items():
        names = {
            f"{node.module}.{alias.name}"
            for node in parsed(file).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        left[module] = {
            name if name in MODULES else name.rpartition(".")[0] for name in names
        } & MODULES.keys()
    assert len(left) > 100
    while free := [module for module, needs in left.items() if not needs & left.keys() - {module}]:
        for module in free:
            del left[module]
    assert not left, f"these import each other: {sorted(left)}"


def test_file_names_are_unique_and_stand_in_the_glossary():
    stems = [file.stem for file in FILES.values() if not file.stem.startswith("__")]
    assert len(stems) == len(set(stems)), [stem for stem in set(stems) if stems.count(stem) > 1]
    glossary = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| `(\w+)` \| \S", glossary, re.MULTILINE)
    assert sorted(terms) == sorted(stems)


def test_every_part_of_the_package_has_its_rule():
    packages = {module for module, file in MODULES.items() if file.stem == "__init__"} - {"vit"}
    modules = {f"vit.{path.stem}" for path in (ROOT / "vit").glob("[!_]*.py")}
    assert packages | modules == set(ALLOWED)


@pytest.mark.parametrize("library", ONLY)
def test_a_library_has_one_address(library):
    for path, file in FILES.items():
        if any(within(name, {library}) for name in imports(file)):
            here = f"vit/{path}"
            assert any(here.startswith(home) for home in ONLY[library]), f"{library} in {here}"


def test_only_tasks_config_and_commands_compare_the_name_of_a_task():
    """A module uses the Task of a network instead."""
    exempt = ("tasks/", "config/", "commands/")
    compared = []
    for path, file in FILES.items():
        nodes = ast.walk(parsed(file))
        for compare in (node for node in nodes if isinstance(node, ast.Compare)):
            words = {part.value for part in ast.walk(compare) if isinstance(part, ast.Constant)}
            if words & TASKS.keys() and re.search(r"\btasks?\b", ast.unparse(compare)):
                compared.append(path)
    assert any(name.startswith("config/") for name in compared), "the search finds none at all"
    assert not [name for name in compared if not name.startswith(exempt)]


def test_one_module_renames_finished_files():
    """The others use its writers; sorted images must not replace a file, which no rename checks."""
    renaming = set()
    for path, file in FILES.items():
        for call in ast.walk(parsed(file)):
            match call:
                case ast.Call(ast.Attribute(ast.Name("os"), "replace" | "rename")) | ast.Call(
                    ast.Attribute(_, "replace" | "rename"), [_], []
                ):
                    renaming.add(path)
    assert renaming == {"atomic_files.py", "output/sort_into_folders.py"}


def test_one_module_times_networks():
    """The others show progress or choose how to decode; deadlines are by time.monotonic."""
    progress = {"training/logging/training_progress.py", "training/training_loop.py"}
    decoding = {"data/image_cache.py", "training/settings_from_data.py"}
    assert files_with("perf_counter") == {"timing.py", *progress, *decoding}


def files_with(*words: str) -> set[str]:
    """Modules of the package whose code has one of `words`."""
    texts = {path: file.read_text(encoding="utf-8") for path, file in FILES.items()}
    return {path for path, text in texts.items() if any(word in text for word in words)}


def test_one_module_opens_engines():
    """Prediction, evaluation and serving have a Predictor; the network behind it is its own."""
    opened = files_with("return TorchEngine(", "= OnnxClassifier(", "= OnnxCaptioner(")
    assert opened == {"inference/predictor.py", "exported/engine.py"}


def test_one_module_lists_images():
    """`vit check` and trainings see the same files; runs and similar names are other lists."""
    listing = files_with("os.walk(", "os.scandir(", ".rglob(")
    assert listing == {"data/sources/file_walk.py", "evaluation/runs_table.py", "paths.py"}


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


@pytest.mark.parametrize(
    "words",
    mostly_slow(
        [
            ["--help"],
            ["train", "--help"],
            ["predict", "--help"],
            ["evaluate", "--help"],
            ["models", "--help"],
            ["train", "--epohcs", "3"],
            ["summary", "--help"],
            ["summary", "vit_smal"],
            ["summary", "vit_tiny_patch16_224", "--norm", "batch"],
        ]
    ),
)
def test_help_and_wrong_flags_need_no_torch(words):
    code = (
        "import sys; from vit.commands.main import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'timm', 'numpy', 'PIL', 'accelerate', 'transformers'} & {*sys.modules};"
        "assert not heavy, heavy; sys.exit(code)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == (0 if "--help" in words else 2), run.stderr
    assert "(default: None)" not in run.stdout

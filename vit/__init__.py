"""Vision Transformers: train, predict, evaluate, export, with one call each.

Train on a folder with one folder per class, within a time; a plan chooses the other settings:

    result = vit.train("photos/", "runs/photos", time="20m")
    print(result.epoch, f"{result.val_top1:.1%}")

Fine-tune pretrained weights; every flag of the command line is an argument of the same name:

    result = vit.train("photos/", "runs/fine", weights="runs/photos", method="probe", seed=1)

Predict images: paths, PIL images, arrays (height, width, 3), tensors (3, height, width):

    predictor = vit.Predictor("runs/photos")
    for result in predictor(["cat.jpg", Image.open("dog.png")], top_k=3):
        print(result.image, result.error or result.predictions[0])

Evaluate on labelled images, with confidence intervals; all shares are fractions:

    scores = vit.evaluate("runs/photos", "photos/", device="cpu")
    print(scores["top1"], scores["top1_interval"])

Use the network, new or pretrained (timm/NAME, hf/OWNER/NAME, a run folder), as a torch module:

    model = vit.create_model("vit_tiny_patch16_224", num_classes=10, image_size=32, patch_size=4)
    logits = model(torch.zeros(8, 3, 32, 32))
    model = vit.from_pretrained("runs/photos", num_classes=5)

Functions, each a command of the same name: train, plan, tune, predict, evaluate, calibrate,
compare, drift, runs, check, suggest, verify, report, serve, summary; export_model, export_data,
convert_model and list_models are `vit export`, `data`, `convert` and `models`; cross_validate is
`vit train --folds`; set_max_pixels is their flag --max-pixels. Classes: Predictor, Search (of
captions), Config (by make_config), VisionTransformer, Captioner. Errors that you can fix are raised
as vit.errors.VitError, in one line with the remedy. `help(vit.train)` explains one; docs/README.md
has a page per question.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 11):  # noqa: UP036  a checkout was not installed by pip
    running = ".".join(map(str, sys.version_info[:2]))
    raise ImportError(f"vit needs Python 3.11 or newer; this is Python {running}")

from vit.quick_imports import require_supported_versions
from vit.version import __version__ as __version__

if TYPE_CHECKING:
    from vit.commands.serve_command import serve as serve
    from vit.commands.summary_command import summary as summary
    from vit.commands.train_command import cross_validate as cross_validate
    from vit.config import Config as Config
    from vit.config.setting_layers import make_config as make_config
    from vit.data.image_io import set_max_pixels as set_max_pixels
    from vit.data.sources.dataset_export import export_data as export_data
    from vit.evaluation.runs_table import runs as runs
    from vit.export.export_formats import export_model as export_model
    from vit.export.export_formats import export_onnx as export_onnx
    from vit.export.verification import verify as verify
    from vit.generation.generation_config import Search as Search
    from vit.inference.calibrate import calibrate as calibrate
    from vit.inference.compare import compare as compare
    from vit.inference.compare import compare_runs as compare_runs
    from vit.inference.drift import drift as drift
    from vit.inference.evaluate import evaluate as evaluate
    from vit.inference.label_errors import check as check
    from vit.inference.prediction_job import predict as predict
    from vit.inference.predictor import Predictor as Predictor
    from vit.inference.suggest import suggest as suggest
    from vit.model.build import create_model as create_model
    from vit.model.captioner import Captioner as Captioner
    from vit.model.vision_transformer import VisionTransformer as VisionTransformer
    from vit.training.final_report import report as report
    from vit.training.plan import plan_training as plan_training
    from vit.training.train import plan as plan
    from vit.training.train import train as train
    from vit.training.tune import tune as tune
    from vit.weights.convert import convert_model as convert_model
    from vit.weights.load_model import from_pretrained as from_pretrained
    from vit.weights.load_model import list_models as list_models

# public name -> the module that has it, which is imported on first use: `import vit` costs nothing
_HOMES = {
    "Captioner": "vit.model.captioner",
    "Config": "vit.config",
    "Predictor": "vit.inference.predictor",
    "Search": "vit.generation.generation_config",
    "VisionTransformer": "vit.model.vision_transformer",
    "calibrate": "vit.inference.calibrate",
    "check": "vit.inference.label_errors",
    "compare": "vit.inference.compare",
    "compare_runs": "vit.inference.compare",
    "convert_model": "vit.weights.convert",
    "create_model": "vit.model.build",
    "cross_validate": "vit.commands.train_command",
    "drift": "vit.inference.drift",
    "evaluate": "vit.inference.evaluate",
    "export_data": "vit.data.sources.dataset_export",
    "export_model": "vit.export.export_formats",
    "export_onnx": "vit.export.export_formats",
    "from_pretrained": "vit.weights.load_model",
    "list_models": "vit.weights.load_model",
    "make_config": "vit.config.setting_layers",
    "plan": "vit.training.train",
    "plan_training": "vit.training.plan",
    "predict": "vit.inference.prediction_job",
    "report": "vit.training.final_report",
    "runs": "vit.evaluation.runs_table",
    "serve": "vit.commands.serve_command",
    "set_max_pixels": "vit.data.image_io",
    "suggest": "vit.inference.suggest",
    "summary": "vit.commands.summary_command",
    "train": "vit.training.train",
    "tune": "vit.training.tune",
    "verify": "vit.export.verification",
}

__all__ = sorted([*_HOMES, "__version__"])

_checked = False
"""Whether the versions of the libraries were checked."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vit' has no attribute {name!r}")
    if not _checked:
        require_supported_versions()
        globals()["_checked"] = True
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

"""Vision Transformers: training, evaluation, prediction and export.

The public names are imported on first use, so `import vit` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from vit.version import __version__
from vit.weights.library_registration import register

if TYPE_CHECKING:
    from vit.config import Config
    from vit.config.parser import make_config
    from vit.data.sources.dataset_export import export_data
    from vit.export.export_onnx import export_onnx
    from vit.export.verification import verify
    from vit.generation.generation_config import Search
    from vit.inference.evaluate import evaluate
    from vit.inference.label_errors import check
    from vit.inference.prediction_job import predict
    from vit.inference.predictor import Predictor
    from vit.model.build import create_model
    from vit.model.captioner import Captioner
    from vit.model.vision_transformer import VisionTransformer
    from vit.training.plan import plan_training
    from vit.training.train import train
    from vit.training.tune import tune
    from vit.weights.convert import convert_model
    from vit.weights.load_model import from_pretrained

register()

_HOMES = {
    "Captioner": "vit.model.captioner",
    "Config": "vit.config",
    "Predictor": "vit.inference.predictor",
    "Search": "vit.generation.generation_config",
    "VisionTransformer": "vit.model.vision_transformer",
    "check": "vit.inference.label_errors",
    "convert_model": "vit.weights.convert",
    "create_model": "vit.model.build",
    "evaluate": "vit.inference.evaluate",
    "export_data": "vit.data.sources.dataset_export",
    "export_onnx": "vit.export.export_onnx",
    "from_pretrained": "vit.weights.load_model",
    "make_config": "vit.config.parser",
    "plan_training": "vit.training.plan",
    "predict": "vit.inference.prediction_job",
    "train": "vit.training.train",
    "tune": "vit.training.tune",
    "verify": "vit.export.verification",
}

__all__ = [
    "Captioner",
    "Config",
    "Predictor",
    "Search",
    "VisionTransformer",
    "__version__",
    "check",
    "convert_model",
    "create_model",
    "evaluate",
    "export_data",
    "export_onnx",
    "from_pretrained",
    "make_config",
    "plan_training",
    "predict",
    "train",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

"""A folder in transformers' layout of a network that transformers has no class of: ours registers.

    config.json     model_type "vit_toolkit", and the settings of the network under `network`
    tensors         by our names after "network."

Source: the classes are in vit/weights/formats/huggingface_classes.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from vit.config import ModelConfig
from vit.errors import WeightsError, printable
from vit.weights.formats.state_dict_names import State
from vit.weights.saved_model import model_config

MODEL_TYPE = "vit_toolkit"
PREFIX = "network."
CLASSES = {True: "VitToolkitForImageClassification", False: "VitToolkitModel"}


def write_own(
    state: Mapping[str, Tensor], config: ModelConfig, classes: Sequence[str]
) -> tuple[dict[str, Any], State]:
    """config.json, and the tensors of the class that we register.

    Args:
        state: Tensors by our names.
        config: The network.
        classes: Names by output.
    """
    labels = {
        "id2label": {str(index): name for index, name in enumerate(classes)},
        "label2id": {name: index for index, name in enumerate(classes)},
    }
    settings = {
        "architectures": [CLASSES[config.num_classes > 0]],
        "model_type": MODEL_TYPE,
        "image_size": config.image_size,
        "num_channels": config.channels,
        **(labels if classes else {}),
        "network": asdict(config),
    }
    # safetensors wants tensors that share no memory
    tensors = {f"{PREFIX}{name}": tensor.contiguous().clone() for name, tensor in state.items()}
    return settings, tensors


def read_own(content: Mapping[str, Any], state: Mapping[str, Tensor]) -> tuple[ModelConfig, State]:
    """The inverse of `write_own`.

    Raises:
        WeightsError: The settings or the names of tensors are others.
    """
    strange = [name for name in state if not name.startswith(PREFIX)]
    if strange:
        raise WeightsError(f"{printable(strange[0])} is no tensor of model_type={MODEL_TYPE}")
    config = model_config(content.get("network"))
    return config, {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}

"""Settings and class names that a file gives back: every name and type is checked."""

from collections.abc import Sequence
from typing import Any

from vit.config import DecoderConfig, ModelConfig
from vit.errors import ConfigError, WeightsError, printable
from vit.settings import all_settings, convert

# settings that every run folder has; what came later has a default that changes nothing
FIRST_SETTINGS = {
    *("image_size", "patch_size", "channels", "num_classes", "dim", "depth", "num_heads"),
    *("hidden_dim", "class_token", "registers", "position", "norm", "norm_order", "qk_norm"),
    *("feedforward", "activation", "layer_scale", "pooling"),
    *("dropout", "attention_dropout", "drop_path"),
}


def model_config(values: Any) -> ModelConfig:
    """The inverse of `asdict`, with every name and type checked.

    Raises:
        ConfigError: A setting is unknown or missing, has the wrong type, or contradicts another.
    """
    known = {name: s.kind for name, s in all_settings().items() if s.section == "model"}
    if not isinstance(values, dict) or not FIRST_SETTINGS <= values.keys() <= known.keys():
        raise ConfigError(f"the model's settings must be exactly {', '.join(known)}")
    return ModelConfig(**{name: convert(known[name], values[name], name) for name in values})


def decoder_config(values: Any) -> DecoderConfig:
    """The inverse of `asdict`, with every name and type checked.

    Raises:
        ConfigError: A setting is unknown or missing, has the wrong type, or contradicts another.
    """
    known = {name: s.kind for name, s in all_settings().items() if s.section == "decoder"}
    if not isinstance(values, dict) or not {"vocab_size", "caption_tokens"} <= values.keys():
        raise ConfigError("the decoder's settings are incomplete")
    if unknown := values.keys() - known.keys():
        raise ConfigError(f"{printable(min(unknown))} is not a setting of the decoder")
    return DecoderConfig(**{name: convert(known[name], values[name], name) for name in values})


def check_classes(classes: Any, config: ModelConfig) -> tuple[str, ...]:
    """`classes` as a tuple, where they are distinct names and as many as the outputs.

    Raises:
        WeightsError: They are not.
    """
    names = tuple(classes) if isinstance(classes, list | tuple) else ()
    if not config.num_classes and isinstance(classes, list | tuple) and not names:
        return ()
    if not names or not all(isinstance(name, str) for name in names):
        raise WeightsError("classes must be a list of names")
    if len(set(names)) != len(names):
        raise WeightsError("two classes have the same name")
    if len(names) != config.num_classes:
        raise WeightsError(f"{len(names)} class names for num_classes={config.num_classes}")
    return names


def check_thresholds(values: Any, classes: Sequence[str]) -> tuple[float, ...]:
    """`values` as a tuple, where they are probabilities and as many as the classes.

    Raises:
        WeightsError: They are not.
    """
    numbers = tuple(values) if isinstance(values, list | tuple) else ()
    plain = all(isinstance(value, int | float) and 0 <= value <= 1 for value in numbers)
    if not plain or len(numbers) != len(classes):
        raise WeightsError("thresholds must be a probability for each class")
    return tuple(map(float, numbers))

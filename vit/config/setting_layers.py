"""Parses flat settings from YAML files and flags into a Config.

A preset is applied first, then the file, then the flags. Every key is checked against the fields
of vit/config/: unknown and repeated keys and values of another type raise errors.
"""

import dataclasses
from collections.abc import Collection, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from vit.config import SECTIONS, Config, DecoderConfig, ModelConfig, PartialModelConfig
from vit.config.presets import preset, task_defaults
from vit.config.settings import Setting, convert, from_plain, missing_need, settings_of
from vit.config.training_config import AUTO_WEIGHTS
from vit.errors import ConfigError
from vit.paths import did_you_mean
from vit.text import nearest

MAX_BYTES = 1_000_000
RUNS = "runs"
"""Folder of run folders without --out."""
# model settings in every config.json; the default of a newer one is what older runs did
REQUIRED_SETTINGS = {
    *("image_size", "patch_size", "channels", "num_classes", "dim", "depth", "num_heads"),
    *("hidden_dim", "class_token", "registers", "position", "norm", "norm_order", "qk_norm"),
    *("feedforward", "activation", "layer_scale", "pooling"),
    *("dropout", "attention_dropout", "drop_path"),
}
FLAGS_ONLY = ("out", "output", "resume", "overwrite", "config")


@cache
def all_settings() -> dict[str, Setting]:
    """Every setting by name, in the order of the sections and their fields."""
    found: dict[str, Setting] = {}
    for section, kind in SECTIONS.items():
        found |= settings_of(kind, section)
    return found


def settings_with(**properties: Any) -> list[str]:
    return [
        name
        for name, found in all_settings().items()
        if all(getattr(found.properties, key) == value for key, value in properties.items())
    ]


def with_effect(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without those that nothing reads beside the others."""
    every = {name: found.default for name, found in all_settings().items()} | {**values}
    read = {}
    for name, value in values.items():
        found = all_settings()[name]
        need = missing_need(name, every, SECTIONS[found.section])
        if need is None or value in found.properties.off:
            read[name] = value
    return read


@cache
def names_by_alias() -> dict[str, str]:
    """Field name of every key a file may use: the names, and the long flags without dashes."""
    found = {name: name for name in all_settings()}
    for setting in all_settings().values():
        for alias in setting.properties.aliases:
            if alias.startswith("--"):
                found.setdefault(alias[2:].replace("-", "_"), setting.name)
    return found


def as_typed_flag(name: str, value: Any) -> tuple[str, Any]:
    """A setting and its value for messages, as they are typed: `--channels` and `3,0`."""
    found = all_settings()[name].properties
    if found.named:
        return name, value
    return found.aliases[0], ",".join(value) if isinstance(value, list | tuple) else value


class Settings(dict[str, Any]):
    """Settings by field name, converted, in layers by origin; a later layer wins.

        Settings(run={"lr": 1e-3, "epochs": 5}, flag={"lr": "2e-3"})

    Attributes:
        layers: The layers. `data` and `weights` are what those decided; nobody chose it.
        origins: Name -> the last layer that has it.
    """

    def __init__(self, **layers: Mapping[str, Any]) -> None:
        super().__init__()
        self.layers = {origin: checked(values) for origin, values in layers.items()}
        self.origins: dict[str, str] = {}
        for origin, values in self.layers.items():
            self.update(values)
            self.origins |= dict.fromkeys(values, origin)

    @classmethod
    def of(cls, config: Config) -> "Settings":
        """Those of `config` that somebody chose."""
        layers: dict[str, dict[str, Any]] = {}
        values = flatten(config)
        for name in config.settled:
            layers.setdefault(config.origins[name], {})[name] = values[name]
        return cls(**layers)

    @property
    def complete(self) -> bool:
        """Whether they are those of a file, a run or a plan, to which no plan adds others."""
        return not {"file", "run", "plan"}.isdisjoint(self.layers)


def make_config(values: Mapping[str, Any], *, origins: Mapping[str, str] | None = None) -> Config:
    """Build a Config from flat values, by name or alias; the preset named by `model` comes first.

    If they name pretrained weights and no whole network, model settings are checked one by one, and
    together once those of the weights are known.

    Args:
        values: The settings.
        origins: Who chose them, as in `Config.origins`; this call chose all of them if omitted.

    Raises:
        ConfigError: A name is unknown, a value has the wrong type, or two values do not fit.
    """
    settings = values if isinstance(values, Settings) else Settings(call=values)
    chosen = dict(settings)
    origins = settings.origins if origins is None else origins
    model = chosen.get("model", _default_model())
    usual = task_defaults(chosen.get("task"))
    if chosen.get("random_crop") == "simple":  # which keeps all of the short side
        usual.pop("min_crop", None)
    if "min_crop" in chosen:
        usual.pop("random_crop", None)
    chosen = {**preset(model), **usual, **chosen}
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in chosen.items():
        sections[all_settings()[name].section][name] = value
    kinds = dict(SECTIONS)
    if sections["finetune"].get("weights") is not None and not settings.keys() >= REQUIRED_SETTINGS:
        kinds["model"] = PartialModelConfig
    built = {name: kind(**sections[name]) for name, kind in kinds.items()}
    return Config(**built, origins=known_origins(chosen, origins))


def known_origins(values: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, str]:
    """`origins` without those of None that leaves a setting to what decides it."""
    return {
        name: origin
        for name, origin in origins.items()
        if values[name] is not None or not all_settings()[name].properties.decided_by
    }


def with_origins(config: Config) -> Config:
    """`config` in which somebody chose the settings of unknown origin that differ from defaults."""
    origins = {**dict.fromkeys(changed_settings(config), "call"), **config.origins}
    return dataclasses.replace(config, origins=known_origins(config.values(), origins))


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` by field names and converted to their types, not yet checked together."""
    if isinstance(values, Settings):
        return dict(values)
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"settings={repr(values)[:40]} ({type(values).__name__}): give a dict of "
            "settings by name, such as {'data': 'photos', 'epochs': 50}"
        )
    chosen: dict[str, Any] = {}
    for key, value in values.items():
        name = names_by_alias().get(str(key).replace("-", "_"))
        if name is None:
            raise ConfigError(f"{key} is not a setting{why_unknown(key, value)}")
        if (
            name == "batch_size" and value == "auto"
        ):  # a step keeps its size, micro-batches are found
            name, value = "accumulate", None
        if name == "task" and value == "caption,classify":
            value = "classify,caption"
        if name in chosen:
            raise ConfigError(f"{name} is given twice, once as {key}")
        is_word = (name, value) == ("weights", AUTO_WEIGHTS)  # other settings read it as None
        chosen[name] = value if is_word else convert(all_settings()[name].kind, value, name)
    return chosen


def why_unknown(key: Any, value: Any) -> str:
    if key in FLAGS_ONLY:
        return f" of a file: give it as the flag --{key}"
    if isinstance(value, dict):
        return ": settings are flat, write them without a section"
    return nearest(str(key), names_by_alias())


def flatten(config: Config) -> dict[str, Any]:
    """Every setting of `config` by name, as plain values; `make_config` gives it back."""
    flat = {}
    for setting in all_settings().values():
        value = getattr(getattr(config, setting.section), setting.name)
        flat[setting.name] = list(value) if isinstance(value, tuple) else value
    return flat


def with_settings(config: Config, **changes: Any) -> Config:
    """`config` with other settings, by name; values are checked, but not converted."""
    sections: dict[str, Any] = {}
    for name, value in changes.items():
        sections.setdefault(all_settings()[name].section, {})[name] = value
    for section, values in sections.items():
        sections[section] = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **sections)


def changed_settings(config: Config) -> list[str]:
    """Names of the settings that differ from the defaults, those of the preset included."""
    named = {"model": config.training.model, "task": config.training.task}
    usual = {**flatten(make_config(named)), "model": _default_model(), "task": "classify"}
    return [name for name, value in flatten(config).items() if value != usual[name]]


def parse_model_config(values: Any) -> ModelConfig:
    """The inverse of `asdict`, with every name and type checked."""
    newer = {one.name for one in dataclasses.fields(ModelConfig)} - REQUIRED_SETTINGS
    return from_plain(ModelConfig, values, "config", optional=newer)


def parse_decoder_config(values: Any) -> DecoderConfig:
    """As `parse_model_config`, for the decoder."""
    known = {one.name for one in dataclasses.fields(DecoderConfig)}
    optional = known - {"vocab_size", "caption_tokens"}
    return from_plain(DecoderConfig, values, "decoder", optional=optional)


def model_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the network by field name, converted to their types."""
    known = [name for name, found in all_settings().items() if found.section == "model"]
    for word in values:
        if word in ("pretrained", "checkpoint_path"):
            raise ConfigError(
                f"{word} is not a model setting: create_model initialises freshly, and "
                "vit.from_pretrained('timm/NAME') opens pretrained weights"
            )
        if names_by_alias().get(word) not in known:
            hint = nearest(word, known) or f"; choose from {', '.join(known)}"
            raise ConfigError(f"{word} is not a model setting{hint}")
    return checked(values)


def _default_model() -> str:
    return str(all_settings()["model"].default)


def default_run_folder(data: str) -> Path:
    """The default run folder: `RUNS/<name of the data>`."""
    return Path(RUNS) / (Path(data).resolve().name or "run")


class _StrictLoader(yaml.SafeLoader):
    """YAML without tags of its own, doubled keys or aliases (which can grow without bound)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ConfigError("YAML aliases (*name) are not taken in a settings file")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{key} is given twice")
        return super().construct_mapping(node, deep)


def read_settings(path: str | Path) -> dict[str, Any]:
    """Flat values of a YAML file, not yet checked against the settings."""
    try:
        raw = Path(path).read_bytes()
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"is larger than {MAX_BYTES:,} bytes")
        values = yaml.load(raw, _StrictLoader)
        if values is None:
            return {}
        if not isinstance(values, dict):
            raise ConfigError("is not a list of `name: value` lines")
    except OSError as error:
        hint = did_you_mean(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{path}: {error.strerror}{hint}") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        text = str(error).replace('in "<byte string>", ', "at ")
        reason = " ".join(text.split())
        raise ConfigError(f"{path}: {reason}") from None
    return values


def read_stored_settings(path: str | Path) -> dict[str, Any]:
    """Flat values of a file that `write_settings` wrote: as `read_settings`, faster for many files.

    A value is parsed once for all files that have it. What is not plain lines of `name: value` is
    left to `read_settings`, which raises its errors. A file that was emptied is one.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        rows = [line.partition(": ") for line in lines if line and line[0] != "#"]
        pairs = ((name, text) for name, colon, text in rows if colon and name.isidentifier())
        values = {name: _parse_value(text) for name, text in pairs}
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        values = {}
    if not values or len(values) != len(rows):
        values = read_settings(path)
    if not values:
        raise ConfigError(f"{path}: has no settings; restore it")
    return values


@lru_cache(maxsize=10_000)
def _parse_value(text: str) -> Any:
    """The value in the rest of a YAML line."""
    value = yaml.safe_load(text)
    if isinstance(value, dict) or (isinstance(value, list) and text[0] != "["):
        raise ValueError("the line is no `name: value`")
    return value


def write_settings(
    path: str | Path, config: Config, header: str = "", *, only: Collection[str] | None = None
) -> None:
    """Write every setting of `config`, or those in `only`, as flat YAML for `read_settings`."""
    lines = [f"# {line}".rstrip() + "\n" for line in header.splitlines()]
    flat = flatten(config)
    for section, kind in SECTIONS.items():
        names = [name for name in settings_of(kind, section) if only is None or name in only]
        values = {name: flat[name] for name in names}
        if values:
            lines += [f"\n# {section}\n", _plain_yaml(values)]
    Path(path).write_text("".join(lines), encoding="utf-8")


def _plain_yaml(values: dict[str, Any]) -> str:
    """A line a setting; lists stay on their line."""
    rows = []
    for name, value in values.items():
        flow = isinstance(value, list) or None
        text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True, width=10_000)
        rows.append(f"{name}: {text.removesuffix(chr(10)).removesuffix('...').rstrip()}")
    return "\n".join(rows) + "\n"

"""Parses flat settings from YAML files and flags into a Config.

A preset is applied first, then the file, then the flags. Every key is checked against the fields
of vit/config/: unknown and repeated keys and values of another type raise errors.
"""

import ast
import dataclasses
import inspect
import itertools
import math
import os
import sys
import types
import typing
from collections.abc import Collection, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from vit.config import SECTIONS, Config, DecoderConfig, ModelConfig, PartialModelConfig
from vit.config.config_section import Properties, missing_need, properties_of
from vit.config.finetune_config import AUTO_WEIGHTS
from vit.config.presets import preset, task_defaults
from vit.errors import ConfigError
from vit.paths import did_you_mean
from vit.text import nearest as nearest
from vit.text import nearest_names, printable

MAX_BYTES = 1_000_000
RUNS = "runs"
"""Folder of run folders without --out."""
TIMM_NAMES = ("img_size", "in_chans", "embed_dim", "reg_tokens")
"""Names of model settings in timm's create_model, which people type."""
# model settings in every config.json; the default of a newer one is what older runs did
REQUIRED_SETTINGS = {
    *("image_size", "patch_size", "channels", "num_classes", "dim", "depth", "num_heads"),
    *("hidden_dim", "class_token", "registers", "position", "norm", "norm_order", "qk_norm"),
    *("feedforward", "activation", "layer_scale", "pooling"),
    *("dropout", "attention_dropout", "drop_path"),
}
FLAGS_ONLY = ("out", "output", "resume", "overwrite", "config")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of a section: a flag, and a key of the YAML file."""

    name: str
    section: str
    kind: Any
    default: Any
    help: str
    properties: Properties

    @property
    def aliases(self) -> tuple[str, ...]:
        """Alternative flags."""
        return self.properties.aliases


@cache
def all_settings() -> dict[str, Setting]:
    """Every setting by name, in the order of the sections and their fields."""
    found: dict[str, Setting] = {}
    for section, kind in SECTIONS.items():
        hints = typing.get_type_hints(kind, include_extras=True)
        docs = field_docs(kind)
        for field in dataclasses.fields(kind):
            assert field.name not in found, f"two settings are called {field.name}"
            found[field.name] = Setting(
                field.name,
                section,
                hints[field.name],
                field.default,
                docs[field.name],
                properties_of(kind)[field.name],
            )
    return found


@cache
def settings_of(kind: type) -> dict[str, Setting]:
    """The fields of a dataclass of settings by name, with the sentence under each as its help."""
    hints, docs = typing.get_type_hints(kind, include_extras=True), field_docs(kind)
    return {
        field.name: Setting(
            name=field.name,
            section="",
            kind=hints[field.name],
            default=field.default,
            help=" ".join(docs[field.name].split()).removesuffix("."),
            properties=properties_of(kind)[field.name],
        )
        for field in dataclasses.fields(kind)
    }


def split_settings(given: Mapping[str, Any], purpose: str, *kinds: type) -> list[Any]:
    """Settings by name as objects of `kinds`: a value goes to the first one that has its name.

    Args:
        purpose: What an unknown name is not a setting of, such as "a prediction".
    """
    parts: list[dict[str, Any]] = [{} for _ in kinds]
    for name, value in given.items():
        index = next((n for n, kind in enumerate(kinds) if name in settings_of(kind)), None)
        if index is None:
            known = [name for kind in kinds for name in settings_of(kind)]
            raise ConfigError(f"{name} is not a setting of {purpose}{nearest(name, known)}")
        plain = os.fspath(value) if isinstance(value, os.PathLike) else value
        wanted = settings_of(kinds[index])[name].kind
        # text stays as it is: a file may be called none, and so may a token
        as_is = wanted is Any or (wanted == str | None and isinstance(plain, str))
        parts[index][name] = plain if as_is else convert(wanted, plain, name)
    return [kind(**part) for kind, part in zip(kinds, parts, strict=True)]


def settings_with(**properties: Any) -> list[str]:
    """Names of the settings with these properties."""
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


def field_docs(kind: type) -> dict[str, str]:
    """The sentence under each field of a dataclass, also of those it extends, from its source."""
    docs = {}
    for base in [one for one in kind.__mro__[::-1] if dataclasses.is_dataclass(one)]:
        body = _class_bodies(base.__module__)[base.__name__]
        for statement, following in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                assert isinstance(statement.target, ast.Name)
                assert isinstance(following.value, ast.Constant)
                docs[statement.target.id] = str(following.value.value)
    return docs


@cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """The statements of each class of a module; inspect takes three times as long to find one."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


@cache
def names_by_alias() -> dict[str, str]:
    """Field name of every key a file may use: the names, and the long flags without dashes."""
    found = {name: name for name in all_settings()}
    for setting in all_settings().values():
        for alias in setting.aliases:
            if alias.startswith("--"):
                found[alias[2:].replace("-", "_")] = setting.name
    return found


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


def with_origins(config: Config, given: Collection[str] | None = None) -> Config:
    """`config` in which the settings `given` were chosen, or those that differ from defaults."""
    if given is None:
        origins = {**dict.fromkeys(changed_settings(config), "call"), **config.origins}
    else:
        origins = dict.fromkeys(given, "call")
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
    """A hint for an unknown key."""
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
    known = section_types("model")
    if not isinstance(values, dict) or not REQUIRED_SETTINGS <= values.keys() <= known.keys():
        raise ConfigError(f"the model's settings must be exactly {', '.join(known)}")
    return ModelConfig(**{name: convert(known[name], values[name], name) for name in values})


def parse_decoder_config(values: Any) -> DecoderConfig:
    """As `parse_model_config`, for the decoder."""
    known = section_types("decoder")
    if not isinstance(values, dict) or not {"vocab_size", "caption_tokens"} <= values.keys():
        raise ConfigError("the decoder's settings are incomplete")
    if unknown := values.keys() - known.keys():
        raise ConfigError(f"{min(unknown)} is not a setting of the decoder")
    return DecoderConfig(**{name: convert(known[name], values[name], name) for name in values})


def model_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the network by field name, converted to their types."""
    kinds, chosen = section_types("model"), {}
    names = {word: name for word, name in names_by_alias().items() if name in kinds}
    accepted = {*kinds, *TIMM_NAMES}
    for word, value in given.items():
        if word in ("pretrained", "checkpoint_path"):
            raise ConfigError(
                f"{word} is not a model setting: create_model initialises freshly, and "
                "vit.from_pretrained('timm/NAME') opens pretrained weights"
            )
        if word in section_types("decoder"):
            raise ConfigError(
                f"{word} is a setting of a text decoder, and create_model builds none; "
                "vit.model.build.build_captioner(model, decoder) does"
            )
        if word not in accepted:
            near = nearest_names(str(word), names)
            hint = f"did you mean {names[near[0]]}?" if near else f"choose from {', '.join(kinds)}"
            raise ConfigError(f"{word} is not a model setting; {hint}")
        if names[word] in chosen:
            raise ConfigError(f"{names[word]} is given twice, once as {word}")
        chosen[names[word]] = convert(kinds[names[word]], value, names[word])
    return chosen


def section_types(section: str) -> dict[str, Any]:
    """Type of each setting of a section, by name."""
    return {name: found.kind for name, found in all_settings().items() if found.section == section}


def _default_model() -> str:
    return str(all_settings()["model"].default)


def choices_of(kind: Any) -> tuple[str, ...]:
    """The values of a Literal, or the keys of the table that annotates a type; else none."""
    for option in (kind, *typing.get_args(kind)):
        if typing.get_origin(option) is Literal:
            return typing.get_args(option)
        if typing.get_origin(option) is Annotated:
            return tuple(option.__metadata__[0])
    return ()


def convert(kind: Any, value: Any, name: str) -> Any:
    """Check `value`, from a file or typed as a flag, against the annotation `kind`."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        if value in (None, "none", "auto", ["none"]):
            return None
        first, *others = typing.get_args(kind)
        return (
            value
            if any(value in choices_of(one) for one in others)
            else convert(first, value, name)
        )
    if typing.get_origin(kind) in (Literal, Annotated):
        choices = choices_of(kind)
        if value not in choices:
            hint = nearest(str(value), choices)
            raise ConfigError(f"{name}={value!r}: choose one of {', '.join(choices)}{hint}")
        return value
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        if kinds[-1] is Ellipsis:
            return tuple(convert(kinds[0], v, name) for v in _listed(value))
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise ConfigError(f"{name}={value!r}: takes {len(kinds)} numbers")
        return tuple(convert(kind, v, name) for kind, v in zip(kinds, value, strict=True))
    converted = CONVERTERS[kind](value)
    if converted is None:
        raise ConfigError(f"{name}={value!r} is not {TYPE_NAMES[kind]}")
    return converted


def _listed(value: Any) -> list[Any]:
    """The items of a list; flags separate them by commas, and one item needs no list."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def _int(value: Any) -> int | None:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return None
    return value if type(value) is int else None


def _float(value: Any) -> float | None:
    """YAML 1.1 reads 1e-3, without a dot, as a string: that is a number here."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _bool(value: Any) -> bool | None:
    words = {"true": True, "yes": True, "false": False, "no": False}
    return value if type(value) is bool else words.get(str(value).lower())


def _str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


CONVERTERS: dict[type, typing.Callable[[Any], Any]] = {
    int: _int,
    float: _float,
    bool: _bool,
    str: _str,
}
TYPE_NAMES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}


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
        reason = printable(" ".join(text.split()))
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
    for section in SECTIONS:
        names = {setting.name for setting in all_settings().values() if setting.section == section}
        values = {name: value for name, value in flatten(config).items() if name in names}
        if only is not None:
            values = {name: value for name, value in values.items() if name in only}
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

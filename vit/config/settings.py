"""What a setting is: type, default, sentence of help, range, what reads it, what decides it.

Also the base class of the sections, and the conversion of values to the types of their fields.
"""

import ast
import dataclasses
import inspect
import itertools
import math
import operator
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from vit.errors import ConfigError
from vit.text import nearest

T = TypeVar("T")
PRETRAINING_TASKS = ("simclr", "lejepa", "dino", "mae")
"""Values of `task` that learn without labels."""
CAPTION_TASKS = ("caption", "classify,caption")
ONE_CLASS = ("classify", "ordinal", "taxonomy")
"""Values of `task` that learn exactly one class an image, and nothing else."""
TREE_TASKS = ("taxonomy",)
"""Values of `task` whose classes are paths in a tree."""
SectionClass = Any  # type[Section], which mypy does not take for hashable
BOUNDS: dict[str, tuple[str, Callable[..., bool]]] = {
    "least": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "most": ("at most", operator.le),
    "below": ("less than", operator.lt),
}
"""Property of a setting -> its words, and whether a value is within it."""


class Other(tuple[Any, ...]):
    """Any value but these."""


ON, LABEL_TASKS = Other((None, 0, "none")), Other(PRETRAINING_TASKS)
Need = Mapping[str, tuple[Any, ...]]
"""Other settings with the values of which one is needed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Properties:
    """What a setting is, beside its name, type and default."""

    aliases: tuple[str, ...] = ()
    """Alternative flags, such as `-b` or `--img-size`."""
    named: bool = True
    """Whether there is a flag of its name; else only its aliases are."""
    alone: str = ""
    """What the flag means without a value."""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    read_by: tuple[Need, ...] = ()
    """What reads it: where one of these does not hold, only the default is accepted."""
    tasks: tuple[str, ...] = ()
    """The same for the setting `task`."""
    off: tuple[Any, ...] = ()
    """Values that mean no more than the default where nothing reads it."""
    unused_by: tuple[str, ...] = ()
    """Values of `method` that have no use for it."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Settings that it is of no use without, with the reason: `out`, or `engine=ray`."""
    incompatible_with: Mapping[str, str] = field(default_factory=dict)
    """Settings that it does not work with, with the reason."""
    decided_by: str = ""
    """What decides it if nobody does: preset, time, weights, data, plan; None leaves it to them."""
    unit: str = ""
    """What it counts: epochs."""
    listed: bool = True
    """In tables of settings; else it is elsewhere on the page, or no choice about the network."""
    before_plan: bool = False
    """The plan is made with it: it is no setting of the network or its optimisation."""
    resumable: bool = False
    """May change on resume: no result depends on it, but for the numbers that dropout draws."""


def setting(default: Any, *aliases: str, **properties: Any) -> Any:
    """A dataclass field with `Properties`."""
    return field(default=default, metadata={"is": Properties(aliases=aliases, **properties)})


class Section:
    """A section of the settings; subclasses are frozen dataclasses."""

    shared: ClassVar[Mapping[str, Any]] = {}
    """`Properties` of all settings of the section."""

    def __post_init__(self) -> None:
        self.check_ranges()
        check_read(vars(self), type(self))
        check_together(self)

    def check_ranges(self) -> None:
        """Check each value by itself; of a tuple, each number."""
        kind: SectionClass = type(self)
        for name, bounds in bounds_of(kind).items():
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values,):
                if value is not None and not all(holds(value, end) for _, holds, end in bounds):
                    texts = [f"{words} {end}" for words, _, end in bounds]
                    self.refuse(name, f"must be {' and '.join(texts)}")

    def refuse(self, name: str, why: str) -> None:
        """Raise a ConfigError that names the setting and its value."""
        refuse(name, getattr(self, name), why)


def refuse(name: str, value: Any, why: str) -> None:
    error = ConfigError(f"{name}={value!r}: {why}")
    error.setting = name
    raise error


@cache
def properties_of(kind: SectionClass) -> dict[str, Properties]:
    plain, shared = Properties(), getattr(kind, "shared", {})
    known = {one.name: one.metadata.get("is", plain) for one in fields(kind)}
    return {name: replace(one, **shared) for name, one in known.items()} if shared else known


@cache
def bounds_of(kind: SectionClass) -> dict[str, list[tuple[str, Callable[..., bool], float]]]:
    """Of each setting with a range its ends, as in BOUNDS."""
    found = {}
    for name, known in properties_of(kind).items():
        ends = [(*how, getattr(known, key)) for key, how in BOUNDS.items()]
        found[name] = [end for end in ends if end[-1] is not None]
    return {name: ends for name, ends in found.items() if ends}


@cache
def conditions_of(kind: SectionClass) -> dict[str, tuple[tuple[Any, ...], tuple[Need, ...]]]:
    """Of each setting that not all trainings read: the values they all accept, and its needs."""
    found = {}
    for one in fields(kind):
        known = properties_of(kind)[one.name]
        needs = (*known.read_by, {"task": known.tasks}) if known.tasks else known.read_by
        found[one.name] = (one.default, *known.off), needs
    return {name: (accepted, needs) for name, (accepted, needs) in found.items() if needs}


def missing_need(name: str, values: Mapping[str, Any], kind: SectionClass) -> Need | None:
    """What a setting needs and `values` do not have; what they lack is left open."""
    _, needs = conditions_of(kind).get(name, ((), ()))
    for need in needs:
        if need.keys() <= values.keys() and not any(
            (values[part] in wanted) != isinstance(wanted, Other) for part, wanted in need.items()
        ):
            return need
    return None


def check_read(values: Mapping[str, Any], kind: SectionClass) -> None:
    """Refuse a setting of the section `kind` that nothing reads beside the other `values`."""
    for name, (accepted, _) in conditions_of(kind).items():
        if values[name] in accepted:
            continue
        if (need := missing_need(name, values, kind)) is not None:
            refuse(name, values[name], why_unread(values, need))


def check_together(config: Section) -> None:
    """Refuse settings without what they need, or with what excludes them, as beside the fields.

    Either is the name of another setting, or `name=value`.
    """

    def is_chosen(words: str) -> bool:
        name, _, wanted = words.partition("=")
        value = getattr(config, name)
        return value == wanted if wanted else value is not None and value is not False

    kind: SectionClass = type(config)
    for name, known in linked_settings(kind).items():
        if not is_chosen(name):
            continue
        for other, why in known.needs.items():
            if not is_chosen(other):
                config.refuse(name, f"needs {other}: {why}")
        for other, why in known.incompatible_with.items():
            if is_chosen(other):
                config.refuse(name, f"does not work with {other}{why and ': '}{why}")


@cache
def linked_settings(kind: SectionClass) -> dict[str, Properties]:
    """The settings that need others, or do not work with them."""
    every = properties_of(kind).items()
    return {name: known for name, known in every if known.needs or known.incompatible_with}


def as_typed(value: object) -> str:
    """A setting's value as a user would type it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def why_unread(values: Mapping[str, Any], need: Need) -> str:
    """`stem=linear does not read it; stem=conv does`."""
    now = [f"{part}={as_typed(values[part])}" for part in need]
    others = [
        f"another {part}"
        if isinstance(wanted, Other)
        else f"{part}={' or '.join(map(as_typed, wanted))}"
        for part, wanted in need.items()
    ]
    does = "does" if len(need) == 1 else "do"
    return f"{' and '.join(now)} {does} not read it; {' or '.join(others)} does"


@dataclass(frozen=True)
class Setting:
    """One field of a section: a flag, and a key of the YAML file."""

    name: str
    section: str
    """Section of a training; "" for settings of commands."""
    kind: Any
    default: Any
    help: str
    properties: Properties


@cache
def settings_of(kind: type, section: str = "") -> dict[str, Setting]:
    """The fields of a dataclass of settings by name, with the sentence under each as its help."""
    hints, docs = typing.get_type_hints(kind, include_extras=True), field_docs(kind)
    return {
        field.name: Setting(
            name=field.name,
            section=section,
            kind=hints[field.name],
            default=field.default,
            help=docs[field.name],
            properties=properties_of(kind)[field.name],
        )
        for field in fields(kind)
    }


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


def from_plain(kind: type[T], values: Any, name: str, *, optional: Collection[str] = ()) -> T:
    """The dataclass `kind` from what `dataclasses.asdict` gave and JSON kept.

    Args:
        name: That of the values, for errors.
        optional: Fields that may be missing, and then have their default.
    """
    hints = typing.get_type_hints(kind)
    kinds = {one.name: hints[one.name] for one in fields(kind)}  # type: ignore[arg-type]
    needed = kinds.keys() - {*optional}
    if not isinstance(values, dict) or not needed <= values.keys() <= kinds.keys():
        names = values.keys() if isinstance(values, dict) else [values]
        given = ", ".join(map(str, names)) or "nothing"
        raise ConfigError(f"{name} must have exactly {', '.join(sorted(needed))}, and has {given}")
    return kind(**{key: convert(kinds[key], values[key], f"{name}.{key}") for key in values})


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
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        first, *others = options
        if any(value in choices_of(one) for one in others):
            return value
        return None if value in (None, "none", "auto", ["none"]) else convert(first, value, name)
    if origin in (Literal, Annotated):
        choices = choices_of(kind)
        if value not in choices:
            hint = nearest(str(value), choices)
            raise ConfigError(f"{name}={value!r}: choose one of {', '.join(choices)}{hint}")
        return value
    if origin is tuple:
        if options[-1] is Ellipsis:
            return tuple(convert(options[0], one, name) for one in _listed(value))
        if not isinstance(value, list | tuple) or len(value) != len(options):
            raise ConfigError(f"{name}={value!r}: takes {len(options)} numbers")
        return tuple(convert(kind, v, name) for kind, v in zip(options, value, strict=True))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise ConfigError(f"{name}={value!r} is not an object of JSON")
        return {key: convert(options[1], one, name) for key, one in value.items()}
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


CONVERTERS: dict[type, Callable[[Any], Any]] = {
    int: _int,
    float: _float,
    bool: _bool,
    str: _str,
}


TYPE_NAMES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}

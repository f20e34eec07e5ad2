"""What a setting is: default, range, what reads it, what decides it; base class of the sections."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar

from vit.errors import ConfigError

PRETRAINING_TASKS = ("simclr", "lejepa", "dino", "mae")
"""Values of `task` that learn without labels."""
CAPTION_TASKS = ("caption", "classify,caption")
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
    """What decides it if nobody does: time, weights, data or plan; None leaves it to them."""
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
    """Raise a ConfigError that names the setting and its value."""
    error = ConfigError(f"{name}={value!r}: {why}")
    error.setting = name
    raise error


@cache
def properties_of(kind: SectionClass) -> dict[str, Properties]:
    """The properties of each setting of a section."""
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


def check_read(values: Mapping[str, Any], *kinds: SectionClass) -> None:
    """Refuse a setting of the sections `kinds` that nothing reads beside the other `values`."""
    for kind in kinds:
        for name, (accepted, _) in conditions_of(kind).items():
            if values[name] in accepted:
                continue
            if (need := missing_need(name, values, kind)) is not None:
                refuse(name, values[name], why_unread(values, need))


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

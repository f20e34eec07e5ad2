"""A user's own code in a training, by Python only: callbacks, a loss and a transform.

    callbacks   .after_step(run, step)   .after_validation(run, scores)   .at_end(run, result)
    loss        (logits, targets) -> one number an image
    transform   (image, generator) -> image

user_code.json of the run folder has their names and sources: a run resumes with the same code.
"""

import inspect
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import LambdaType
from typing import Any

from vit.errors import ConfigError
from vit.text import join_names, printable

USER_CODE_FILE = "user_code.json"
METHODS = ("after_step", "after_validation", "at_end")
"""Of a callback, which has one of them at least."""


@dataclass(frozen=True, kw_only=True)
class UserCode:
    """What `vit.train` calls; see docs/own-code.md."""

    callbacks: tuple[Any, ...] = ()
    loss: Callable[[Any, Any], Any] | None = None
    transform: Callable[[Any, Any], Any] | None = None

    def __post_init__(self) -> None:
        for name, code in self.items():
            fits, wanted = callable(code), "a function of two arguments"
            if name == "callbacks":
                fits = any(hasattr(code, each) for each in METHODS)
                wanted = f"objects with {', '.join(METHODS[:-1])} or {METHODS[-1]}"
            if isinstance(code, type) or not fits:
                raise ConfigError(f"{name}={code!r}: give {wanted}")

    def __reduce__(self) -> Any:
        """What loader processes get, where they are not forked: the rest need not be picklable."""
        try:
            pickle.dumps(self.transform)
        except Exception as error:
            where = "give a function of a module's top level, or workers=0"
            raise ConfigError(f"transform={name_of(self.transform)}: {error}; {where}") from None
        return partial(UserCode, transform=self.transform), ()

    def items(self) -> list[tuple[str, Any]]:
        """Argument of `vit.train` and value of each part that is given."""
        given = [*(("callbacks", each) for each in self.callbacks), ("loss", self.loss)]
        return [pair for pair in (*given, ("transform", self.transform)) if pair[1] is not None]

    def record(self) -> list[dict[str, str]]:
        return [{"argument": name, **describe(code)} for name, code in self.items()]

    def require_same(self, folder: Path) -> None:
        """Refuse to resume the run in `folder` without its code, or with another loss or transform;
        a callback of the same name may have changed, since it reads only."""
        path, ours = folder / USER_CODE_FILE, self.record()
        theirs = json.loads(path.read_bytes()) if path.is_file() else []
        then, now = ([f"{e['argument']}={e['name']}" for e in each] for each in (theirs, ours))
        if then != now:
            raise ConfigError(
                f"{folder} was trained with own code {join_names(then) or 'none'}, not "
                f"{join_names(now) or 'none'}: resume it with the same from Python, "
                f"vit.train(out={str(folder)!r}, resume=True, ...), which the command line cannot"
            )
        for name, one, other in zip(now, ours, theirs, strict=True):
            if one != other and one["argument"] != "callbacks":
                raise ConfigError(
                    f"{name} differs from that in {path}: resume with that one, or start a new run"
                )


def name_of(code: Any) -> str:
    """The name of a function, or of the class of an object."""
    return printable(_named(code).__name__)


def describe(code: Any) -> dict[str, str]:
    """Name and source of a function, or of the class of an object, and its `repr`; of a lambda,
    whose lines are those of the call around it, what it is compiled to."""
    named = _named(code)
    try:
        source = inspect.getsource(named)
    except (OSError, TypeError):  # typed at a prompt, or compiled
        source = ""
    if isinstance(named, LambdaType) and named.__name__ == "<lambda>":
        compiled = named.__code__
        source = f"{compiled.co_code.hex()} {compiled.co_names} {compiled.co_consts}"
    value = re.sub(r" at 0x\w+", "", repr(code))
    return {"name": name_of(code), "value": value, "source": source}


def _named(code: Any) -> Any:
    function = code.func if isinstance(code, partial) else code
    return function if hasattr(function, "__name__") else type(function)

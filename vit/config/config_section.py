"""Base class of the settings' dataclasses: aliases of fields, and checks of values."""

from dataclasses import field
from typing import Any

from vit.errors import ConfigError


def setting(default: Any, *aliases: str, **properties: Any) -> Any:
    """A dataclass field with alternative flags, such as `-b` or `--img-size`, and `properties`."""
    return field(default=default, metadata={"aliases": aliases, **properties})


class Section:
    """A section of the settings; subclasses are frozen dataclasses."""

    def refuse(self, name: str, why: str) -> None:
        """Raise a ConfigError that names the setting and its value."""
        error = ConfigError(f"{name}={getattr(self, name)!r}: {why}")
        error.setting = name
        raise error

    def check_at_least(self, least: float, *names: str) -> None:
        for name in names:
            if not getattr(self, name) >= least:
                self.refuse(name, f"must be at least {least}")

    def check_above(self, bound: float, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > bound:
                self.refuse(name, f"must be more than {bound}")

    def check_fraction(self, *names: str, one: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            if not (0 <= value < 1 or (one and value == 1)):
                self.refuse(name, f"must be a share from 0 to 1{'' if one else ', 1 excluded'}")

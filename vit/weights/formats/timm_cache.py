"""Cache of facts about timm networks, on disk: importing timm takes longer than labelling an image.

The facts of a network are a pure function of its name, its arguments, the shapes of its tensors and
the versions of timm and of this package, which are the name of the cached file.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from vit.atomic_files import write_text
from vit.config import ModelConfig
from vit.config.parser import parse_model_config
from vit.errors import RunError
from vit.paths import user_cache
from vit.weights.formats.timm_network import RotaryOrder


class TimmFacts(NamedTuple):
    """Facts about a timm network and its weights."""

    config: ModelConfig
    rotary_order: RotaryOrder | None
    """Channel order of its rotary embedding, if it has one."""
    pretrained_cfg: dict[str, Any]
    """Metadata of the weights: preprocessing, license, tag."""
    notes: tuple[str, ...]
    """Assumptions about the image size."""
    classes: tuple[str, ...] | None
    """Class names that a tag stands for, if they were requested."""
    class_notes: tuple[str, ...]


def cached_facts(
    compute: Callable[[], TimmFacts], state: Mapping[str, Tensor], **question: Any
) -> TimmFacts:
    """The result of `compute`, from the user's cache folder if it is there.

    In a process that has imported timm there is nothing to gain, and its registry may have been
    changed: `compute` is called, and nothing is read or written.
    """
    if "timm" in sys.modules:
        return compute()
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    path = user_cache() / "timm" / f"{cache_key(shapes=shapes, **question)}.json"
    facts = load_facts(path)
    if facts is None:
        facts = compute()
        # after an error, it is computed again each time
        with suppress(OSError, RunError, TypeError, ValueError):
            save_facts(path, facts)
    return facts


def cache_key(**question: Any) -> str:
    """SHA-256 of the question, timm's version and the sources that read timm's network."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    asked = {"timm": version("timm"), "sources": digest, **question}
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


def load_facts(path: Path) -> TimmFacts | None:
    """The facts in a file; None if it is missing or damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        order, classes = values["rotary_order"], values["classes"]
        return TimmFacts(
            parse_model_config(values["config"]),
            None if order is None else RotaryOrder(**order),
            dict(values["pretrained_cfg"]),
            tuple(values["notes"]),
            None if classes is None else tuple(classes),
            tuple(values["class_notes"]),
        )
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def save_facts(path: Path, facts: TimmFacts) -> None:
    """Write the facts, so that only complete files appear."""
    order = facts.rotary_order
    values = facts._replace(
        config=asdict(facts.config),  # type: ignore[arg-type]  # for JSON
        rotary_order=None if order is None else asdict(order),  # type: ignore[arg-type]
    )
    text = json.dumps(values._asdict(), allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)

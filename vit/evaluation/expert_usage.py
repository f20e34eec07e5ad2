"""Expert usage of a mixture of experts, as a section of a report."""

from collections.abc import Mapping, Sequence
from typing import Any

from vit.evaluation.html_page import Html, numbers, table, tag
from vit.text import percent

MEANING = (
    "The shares of all choices that each expert gets on the validation images, at the best "
    "epoch: equal shares are the aim, and an expert near 0 is not used (raise --balance-loss). "
    "Entropy is how undecided the router is, 100% where all experts are as probable. Dropped are "
    "choices whose expert had no place left."
)


def experts(epochs: Sequence[Mapping[str, Any]], best: int) -> Html:
    """A row for each layer of experts at epoch `best`; nothing for a network without them."""
    chosen = [event for event in epochs if event["epoch"] == best]
    routers: Sequence[Mapping[str, Any]] = chosen[0].get("routers", ()) if chosen else ()
    if not routers:
        return tag("span")
    heads = ("block", "equal share", "fullest", "emptiest", "entropy", "dropped")
    head = [tag("th", text, class_="n") for text in heads]
    rows = [
        numbers(
            layer["block"],
            percent(1 / len(layer["load"]), 1),
            percent(max(layer["load"]), 1),
            percent(min(layer["load"]), 1),
            percent(layer["entropy"], 1),
            percent(layer["dropped"], 1),
        )
        for layer in routers
    ]
    loads = [
        numbers(layer["block"], *(percent(share, 1) for share in layer["load"]))
        for layer in routers
    ]
    names = ["block", *(str(number + 1) for number in range(len(routers[0]["load"])))]
    wide = [tag("th", name, class_="n") for name in names]
    return tag(
        "section",
        tag("h2", "How the experts are used"),
        table(head, rows),
        tag("p", MEANING, class_="soft small"),
        tag("details", tag("summary", "The share of every expert"), table(wide, loads)),
    )

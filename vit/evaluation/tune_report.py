"""Report of a tuning: a summary, a table for the terminal, and tune.html, one offline file."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit.errors import printable, quoted
from vit.evaluation.charts import Curve, curves, scatter
from vit.evaluation.classification_metrics import Z95
from vit.evaluation.html_page import Html, called, document, hero, numbers, table, tag
from vit.text import format_duration, percent, plural
from vit.version import __version__

PAGE_FILE = "tune.html"
NAMES = {"top1": "top-1", "balanced_accuracy": "balanced accuracy", "map": "mAP"}
# Trials below which a chart of each setting shows nothing but chance.
ENOUGH = 6
# Shares of an axis that lie between two of its marks at least.
APART = 0.18
CHOSEN = (
    "The best of several is partly the luckiest, and it was chosen on these very images: expect a "
    "little less on others."
)

Record = Mapping[str, Any]
"""What tune.json has."""
Result = Mapping[str, Any]
"""A trial in a rung, as in `results` of tune.json."""


def measure_name(result: Result) -> str:
    """The score of a trial in words."""
    return NAMES.get(result["measure"], str(result["measure"]))


def noise(first: float, second: float, images: int) -> float:
    """Difference of two shares below which 95 % of equals lie, each counted on so many images.

    Each share is drawn to a half by four images, which keeps the interval of shares near 1
    honest. Two networks that err on the same images differ by less; the chance in their training
    adds to it. Source: Agresti and Caffo, The American Statistician 54, 2000.
    """
    drawn = [(share * images + 1) / (images + 2) for share in (first, second)]
    return Z95 * math.sqrt(sum(share * (1 - share) for share in drawn) / (images + 2))


def verdict(record: Record, best: Result, plan: Result | None) -> str:
    """Whether the best trial beats the plan, and whether that is more than chance.

    Args:
        record: Of the tuning.
        best: The result of the best trial.
        plan: That of the plan, trained for as long; None where it was not.
    """
    if best["trial"] == 0:
        if sum(one["rung"] == best["rung"] for one in record["results"]) < 2:
            return "No trial was compared with the plan: the plan is the best that is known."
        return "No trial was better than the plan, trained for as long: the plan is the best."
    if plan is None:
        return f"Trial {best['trial']} is the best; the plan was not trained for as long."
    images = record["validation"]
    gain, least = best["score"] - plan["score"], noise(best["score"], plan["score"], images)
    name = measure_name(best)
    scores = f"{name} {percent(best['score'])} against {percent(plan['score'])}"
    if gain <= 0:
        said = f"is as good as the plan ({scores}), with a lower loss"
    else:
        said = f"is {100 * gain:.1f} points above the plan ({scores}), trained for as long"
    weight = "and this is no more" if gain < least else "and this is more"
    return (
        f"Trial {best['trial']} {said}. Differences below about {100 * least:.1f} points are noise "
        f"with {images:,} validation images, {weight}."
    )


def changes_in_words(trial: Mapping[str, Any]) -> str:
    """What a trial changes of the plan."""
    if not trial["changes"]:
        return "the plan"
    return "; ".join(f"{name}={value}" for name, value in trial["changes"].items())


def table_lines(record: Record, standing: Sequence[Result]) -> list[str]:
    """The trials for a terminal, the best first, each in the last rung that it reached.

    Args:
        record: Of the tuning.
        standing: Results, in the order of the table.
    """
    name = next((measure_name(one) for one in standing if "error" not in one), "score")
    lines = [f"{'trial':>5}  {'rung':>4}  {name:>9}  {'loss':>6}  {'steps':>6}  settings"]
    for one in standing:
        score = "failed" if "error" in one else percent(one["score"])
        loss = "" if "error" in one else f"{one['loss']:.3f}"
        words = changes_in_words(record["trials"][one["trial"]])
        reason = f" ({one['error']})" if "error" in one else ""
        lines.append(
            f"{one['trial']:>5}  {one['rung']:>4}  {score:>{max(len(name), 9)}}  {loss:>6}  "
            f"{one['steps']:>6,}  {words}{reason}"
        )
    return lines


def tune_page(
    record: Record, standing: Sequence[Result], plan: Result | None, folder: Path
) -> Html:
    """The whole page.

    Args:
        record: Of the tuning.
        standing: Each trial's result in the last rung that it reached, the best first.
        plan: Result of the plan in the rung of the best; None where there is none.
        folder: Of the tuning.
    """
    best, final = standing[0], record.get("result")
    name, measure = printable(folder.resolve().name or folder), measure_name(best)
    searched = record["seconds"] + sum(one["seconds"] for one in record["results"])
    score = best["score"] if final is None else final["scores"][best["measure"]]
    what = (
        f"validation {measure} of the best settings, trained for {record['time']}"
        if final is not None
        else f"validation {measure} of the best trial; its long training has not ended yet"
    )
    tiles = {
        "trials": len(record["trials"]),
        "rungs": len(record["rungs"]),
        "search": format_duration(searched),
        "best trained for": record["time"],
        "validation images": f"{record['validation']:,}",
    }
    sections = [
        tag("h1", called(name)),
        tag("p", "A tuning of ", tag("b", called(record["settings"]["data"]))),
        hero(percent(score), what, tiles),
        tag("p", verdict(record, best, plan), " ", CHOSEN if best["trial"] else ""),
        tag("p", record["stopped"], class_="soft") if "stopped" in record else Html(""),
        trial_table(record, standing),
        learning(best, plan),
        setting_charts(record, best["trial"]),
        rung_table(record),
        usage(record, folder),
        tag(
            "footer",
            f"Written by vit {__version__}. This file loads nothing from anywhere.",
            class_="soft small",
        ),
    ]
    return document(f"{name}: {percent(score)}", *sections)


def trial_table(record: Record, standing: Sequence[Result]) -> Html:
    """A row a trial, the best first: score, time, and the settings that it changes."""
    trials = record["trials"]
    varied = [name for name in trials[0]["values"] if any(name in one["changes"] for one in trials)]
    best = standing[0]
    head = [
        *(tag("th", title, class_="n") for title in ("trial", "rung", measure_name(best), "loss")),
        *(tag("th", title, class_="n") for title in ("steps", "time")),
        *(tag("th", title.replace("_", " ")) for title in varied),
    ]
    rows = []
    for one in standing:
        trial = trials[one["trial"]]
        name = "0, the plan" if one["trial"] == 0 else one["trial"]
        if "error" in one:
            scores = [tag("td", "failed", class_="n", title=one["error"]), *numbers("")]
        else:
            bar = f"background-size: {100 * one['score']:.1f}% 100%"
            scores = [
                tag("td", percent(one["score"]), class_="n bar", style=bar),
                *numbers(f"{one['loss']:.3f}"),
            ]
        cells = [
            tag("td", tag("b", value)) if setting in trial["changes"] else tag("td", value)
            for setting, value in ((name, trial["values"].get(name, "")) for name in varied)
        ]
        rows.append(
            [
                *numbers(name, one["rung"]),
                *scores,
                *numbers(f"{one['steps']:,}", format_duration(one["seconds"])),
                *(
                    tag("td", "·", class_="soft")
                    if one["trial"] and setting not in trial["changes"]
                    else cell
                    for setting, cell in zip(varied, cells, strict=True)
                ),
            ]
        )
    failed = [one for one in standing if "error" in one]
    return tag(
        "section",
        tag("h2", "Trials"),
        tag(
            "p",
            "Each in the last rung that it reached. Compare scores of one rung alone: the trials "
            "of a later one were trained for longer. A dot is the plan's value; a network is "
            "blocks x width at the size of images.",
            class_="soft small",
        ),
        table(head, rows, class_="wide"),
        *(tag("p", f"Trial {one['trial']} failed: {one['error']}") for one in failed),
    )


def learning(best: Result, plan: Result | None) -> Html:
    """Curves of the best trial and of the plan, trained for as long."""
    if plan is None or best["trial"] == 0 or len(best["epochs"]) != len(plan["epochs"]):
        return Html("")
    epochs = range(1, len(best["epochs"]) + 1)
    lines = [
        Curve("the plan", "train", plan["epochs"]),
        Curve(f"trial {best['trial']}", "val", best["epochs"]),
    ]
    title = f"validation {measure_name(best)}"
    return tag(
        "section",
        tag("h2", f"The plan and trial {best['trial']} in the last rung"),
        tag("div", curves(title, epochs, lines, best=best["epoch"], unit="%"), class_="pair"),
    )


def setting_charts(record: Record, best: int) -> Html:
    """The score over each setting, in the first rung, in which all trials have the same time."""
    results = [one for one in record["results"] if one["rung"] == 1 and "error" not in one]
    if len(results) < ENOUGH:
        return Html("")
    trials = record["trials"]
    drawn = []
    for name in trials[0]["values"]:
        values = {one["trial"]: trials[one["trial"]]["values"].get(name) for one in results}
        if len({*values.values()}) < 2 or None in values.values():
            continue
        place, marks = axis([*values.values()], trials[0]["values"][name])
        styles = {best: "val"} | ({0: "train"} if best else {})
        points = [
            (place(values[one["trial"]]), one["score"], styles.get(one["trial"], "other"))
            for one in results
        ]
        drawn.append(scatter(name.replace("_", " "), points, marks, name="", unit="%"))
    plan = "Blue is the best trial, orange the plan. " if best else "Blue is the plan. "
    return tag(
        "section",
        tag("h2", "Settings"),
        tag(
            "p",
            f"{measure_name(results[0])} in the first rung over each setting. {plan}A trial "
            "changes several settings at once, so a trend in a few points is a hint and no proof.",
            class_="soft small",
        ),
        tag("div", *drawn, class_="pair"),
    )


def axis(values: Sequence[Any], plan: Any) -> tuple[Any, dict[float, object]]:
    """Where a value of a setting stands, and what is written on the axis.

    Many numbers above 0 stand on a logarithmic scale, few of them, and words, side by side.
    """
    some = sorted({*values}, key=lambda value: (isinstance(value, str), value))
    if len(some) <= 5 or isinstance(some[0], str) or some[0] <= 0:
        places = {value: float(at) for at, value in enumerate(some)}
        return places.__getitem__, {float(at): value for at, value in enumerate(some)}
    low, middle, high = (math.log(value) for value in (some[0], plan, some[-1]))
    marks: dict[float, object] = {low: some[0], high: some[-1]}
    if min(middle - low, high - middle) > APART * (high - low):
        marks[middle] = plan
    return math.log, marks


def rung_table(record: Record) -> Html:
    """How long the trials of each rung were trained."""
    head = [tag("th", title, class_="n") for title in ("rung", "trials", "time of each")]
    rows = [
        numbers(at, rung["trials"], f"{rung['seconds']:.0f} s")
        for at, rung in enumerate(record["rungs"], 1)
    ]
    return tag(
        "section",
        tag("h2", "Rungs"),
        tag(
            "p",
            "Every trial of a rung has the same time; one with a larger network or batch makes "
            "fewer steps in it. The best third goes on, and the plan with it.",
            class_="soft small",
        ),
        table(head, rows),
    )


def usage(record: Record, folder: Path) -> Html:
    """What to do with the result."""
    best, recipe = quoted(folder / "best"), quoted(folder / "best.yaml")
    lines = [
        f"vit predict {best} IMAGE...",
        f"vit train -c {recipe} --time {record['settings']['time']} --out ANOTHER",
    ]
    return tag(
        "section",
        tag("h2", "Go on"),
        tag("p", "The trained network is a run folder like any other; the settings are a recipe."),
        *(tag("pre", line) for line in lines),
        tag("p", "Its report: ", tag("a", "best/report.html", href="best/report.html"))
        if "result" in record
        else Html(""),
        tag("p", plural(len(record["results"]), "training"), " made it.", class_="soft small"),
    )

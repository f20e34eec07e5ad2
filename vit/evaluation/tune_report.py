"""Report of a tuning: a summary, a table for the terminal, and tune.html, one offline file."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit.evaluation.charts import Chart, line_chart, scatter_chart
from vit.evaluation.exact_tests import Z95
from vit.evaluation.html_page import render_page
from vit.text import percent

PAGE_FILE = "tune.html"
NAMES = {"top1": "top-1", "balanced_accuracy": "balanced accuracy", "map": "mAP"}
MIN_TRIALS = 6
"""Trials below which a chart of each setting shows nothing but chance."""
MIN_MARK_GAP = 0.18
"""Distance of two marks of an axis, as a share of the axis."""

Record = Mapping[str, Any]
"""The content of tune.json."""
Result = Mapping[str, Any]
"""The result of a trial in a rung, an entry of `results` in tune.json."""


def measure_name(result: Result) -> str:
    """The name of the score that ranks trials."""
    return NAMES.get(result["measure"], str(result["measure"]))


def noise(first: float, second: float, images: int) -> float:
    """Half width of the 95 % interval of the difference of two equal shares of `images`.

    Two pseudo-observations are added to each share, which keeps the interval honest near 1. Two
    networks that err on the same images differ by less; the randomness of training adds to it.

    Source: Agresti and Caffo, The American Statistician 54, 2000.
    """
    shares = [(share * images + 1) / (images + 2) for share in (first, second)]
    return Z95 * math.sqrt(sum(share * (1 - share) for share in shares) / (images + 2))


def verdict(record: Record, best: Result, plan: Result | None) -> str:
    """Whether the best trial is better than the plan by more than chance, as a sentence.

    Args:
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
    """The settings in which a trial differs from the plan."""
    if not trial["changes"]:
        return "the plan"
    return "; ".join(f"{name}={value}" for name, value in trial["changes"].items())


def table_lines(record: Record, standing: Sequence[Result]) -> list[str]:
    """The trials for a terminal, the best first, each in the last rung that it reached.

    Args:
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


def tune_page(record: Record, standing: Sequence[Result], plan: Result | None, folder: Path) -> str:
    """The whole page.

    Args:
        plan: Result of the plan in the rung of the best; None where there is none.
    """
    best, trials, final = standing[0], record["trials"], record.get("result")
    return render_page(
        "tune_report.html.j2",
        heading=folder.resolve().name or folder,
        record=record,
        standing=standing,
        best=best,
        measure=measure_name(best),
        final=final is not None,
        score=best["score"] if final is None else final["scores"][best["measure"]],
        searched=record["seconds"] + sum(one["seconds"] for one in record["results"]),
        verdict=verdict(record, best, plan),
        varied=[
            name for name in trials[0]["values"] if any(name in one["changes"] for one in trials)
        ],
        curves=plan_chart(best, plan),
        setting_charts=setting_charts(record, best["trial"]),
        run_folder=folder / "best",
        recipe=folder / "best.yaml",
    )


def plan_chart(best: Result, plan: Result | None) -> Chart | None:
    """Curves of the best trial and of the plan, where that was trained for as long."""
    if plan is None or best["trial"] == 0 or len(best["epochs"]) != len(plan["epochs"]):
        return None
    curves = {"the plan": plan["epochs"], f"trial {best['trial']}": best["epochs"]}
    title = f"validation {measure_name(best)}"
    epochs = range(1, len(best["epochs"]) + 1)
    return line_chart(title, epochs, curves, best=best["epoch"], unit="%")


def setting_charts(record: Record, best: int) -> list[Chart]:
    """The score over each setting in the first rung, in which all trials have the same time."""
    results = [one for one in record["results"] if one["rung"] == 1 and "error" not in one]
    if len(results) < MIN_TRIALS:
        return []
    trials, styles = record["trials"], {0: "train", best: "val"}
    charts = []
    for name in trials[0]["values"]:
        values = {one["trial"]: trials[one["trial"]]["values"].get(name) for one in results}
        if len({*values.values()}) < 2 or None in values.values():
            continue
        position, marks = axis([*values.values()], trials[0]["values"][name])
        points = [
            (position(values[one["trial"]]), one["score"], styles.get(one["trial"], "other"))
            for one in results
        ]
        charts.append(scatter_chart(name.replace("_", " "), points, marks, unit="%"))
    return charts


def axis(values: Sequence[Any], plan: Any) -> tuple[Any, dict[float, object]]:
    """The position of a setting's value on the axis, as a function, and the marks of the axis.

    More than 5 positive numbers have a logarithmic scale; fewer, and words, are evenly spaced.
    """
    distinct = sorted({*values}, key=lambda value: (isinstance(value, str), value))
    if len(distinct) <= 5 or isinstance(distinct[0], str) or distinct[0] <= 0:
        positions = {value: float(index) for index, value in enumerate(distinct)}
        return positions.__getitem__, {float(index): one for index, one in enumerate(distinct)}
    low, middle, high = (math.log(value) for value in (distinct[0], plan, distinct[-1]))
    marks: dict[float, object] = {low: distinct[0], high: distinct[-1]}
    if min(middle - low, high - middle) > MIN_MARK_GAP * (high - low):
        marks[middle] = plan
    return math.log, marks

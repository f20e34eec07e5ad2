"""docs/features.md: what the toolkit does, what each capability costs, and where it works.

    python -m tools.features            writes the page

A file of vit/ belongs to the capability that names it, or names the nearest folder around it; a
file of tests/ to the capability that names it, or to that of the file it mirrors. Support is read
from the code where it states it (tasks with an attribute), and stated here otherwise.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "features.md"
SUPPORT = {
    "task": (
        "classify",
        "multilabel",
        "caption",
        "ordinal",
        "taxonomy",
        "regression",
        "attributes",
        "pretrain",
    ),
    "data": ("folder", "list", "shards", "hub", "builtin"),
    "engine": ("torch", "onnx", "openvino", "export"),
}
"""Columns of support: `hub` is Hugging Face's, `export` is torch.export."""
ROUNDING = 50
"""Lines are rounded to a multiple of it."""
TOLERANCE = 0.1
"""Share by which lines on the page may differ from those of the code, or ROUNDING lines."""
TASKS, DATA = " ".join(SUPPORT["task"]), " ".join(SUPPORT["data"])
LABELS, CLASSES = (
    "classify multilabel caption ordinal taxonomy regression attributes",
    "classify multilabel ordinal taxonomy",
)
FILES = "onnx openvino"


def tasks_with(attribute: str) -> Callable[[], str]:
    """Names of the tasks of which an attribute is true."""

    def names() -> str:
        from vit.config.settings import PRETRAINING_TASKS
        from vit.config.training_config import TASKS as KNOWN
        from vit.tasks.task import get_task

        found = [name for name in KNOWN if getattr(get_task(name), attribute)]
        return " ".join("pretrain" if name in PRETRAINING_TASKS else name for name in found)

    return names


def formats_of_export() -> str:
    """Engines whose files `vit export` writes."""
    from vit.export.export_formats import FORMATS

    return " ".join("export" if name == "torch" else name for name in FORMATS)


class Capability(NamedTuple):
    """What a user can do with the toolkit. Names are separated by spaces."""

    name: str
    files: str
    """Files, without `.py`, and folders below vit/."""
    commands: str = ""
    task: str | Callable[[], str] = ""
    data: str = ""
    engine: str | Callable[[], str] = ""
    tests: str = ""
    """Test files, without `.py`, and folders below tests/, besides those that mirror `files`."""


CAPABILITIES: Sequence[Capability] = (
    Capability(
        "Train: loop, optimisers, schedules",
        "training tasks config commands/train_command commands/demo_command",
        *("train demo", TASKS, DATA, "torch"),
        tests="training tasks config commands/test_every_source",
    ),
    Capability(
        "Classify", "tasks/classification tasks/losses", "train predict evaluate", "classify", DATA,
        "torch onnx openvino export",
    ),
    Capability(
        "Several labels an image",
        "tasks/multilabel evaluation/multilabel_metrics",
        *("train predict evaluate", "multilabel", "folder list shards hub"),
        "torch onnx openvino export",
        "training/test_multilabel export/test_export_multilabel inference/test_evaluate_multilabel",
    ),
    Capability(
        "Grades", "tasks/ordinal", "train predict evaluate", "ordinal", DATA,
        "torch onnx openvino export",
    ),
    Capability(
        "Taxonomies",
        "tasks/taxonomy class_tree data/sources/taxonomy_file",
        *("train predict evaluate", "taxonomy", DATA, "torch onnx openvino export"),
    ),
    Capability(
        "Numbers",
        "tasks/regression number_answers evaluation/number_metrics evaluation/number_page "
        "data/sources/number_columns",
        *("train predict evaluate", "regression attributes", "list", "torch onnx openvino"),
    ),
    Capability(
        "Several questions", "tasks/attributes", "train predict evaluate", "attributes", "list",
        "torch onnx openvino export",
    ),
    Capability(
        "Captions",
        "tasks/captioning model/decoder model/captioner model/kv_cache generation data/captions "
        "evaluation/caption_metrics evaluation/caption_page "
        "config/decoder_config exported/exported_captioner "
        "export/captioner_graph",
        *("train predict evaluate", tasks_with("writes_captions"), "list shards hub builtin"),
        "torch onnx",
        "generation training/test_captioning commands/test_captions_commands "
        "data/sources/test_captions inference/test_evaluate_captions inference/captioners",
    ),
    Capability(
        "Learn without labels",
        "tasks/pretraining tasks/simclr tasks/dino tasks/lejepa tasks/masked_autoencoder "
        "model/mae_network model/projection_head data/multi_view "
        "evaluation/feature_quality commands/pretrain_command",
        *("pretrain", "pretrain", "folder list shards hub", "torch"),
    ),
    Capability(
        "Learn from a teacher",
        "tasks/distillation training/teacher",
        *("train", "classify multilabel", DATA, "torch onnx openvino"),
    ),
    Capability(
        "Fine-tune, probe, LoRA, new classes",
        "training/finetune ",
        *("train", LABELS, DATA, "torch"),
        tests="training/finetune",
    ),
    Capability(
        "Plan a training",
        "training/plan training/plan_rules training/plan_weights "
        "commands/plan_command",
        *("plan train", TASKS, DATA, "torch"),
        tests="training/test_recipes",
    ),
    Capability(
        "Choose pretrained weights by measuring",
        "training/backbone_selection weights/backbone_list",
        *("train plan models", CLASSES, DATA, "torch"),
    ),
    Capability(
        "Train within a time, memory and cores that fit",
        "timing training/time_budget training/auto_batch_size training/trial_training "
        "training/loader_autotune",
        *("train pretrain", TASKS, DATA, "torch"),
    ),
    Capability(
        "Search settings",
        "training/tune commands/tune_command",
        *("tune", CLASSES, DATA, "torch"),
    ),
    Capability(
        "Cross-validate",
        "training/cross_validation ",
        *("train", CLASSES, "folder list", "torch"),
    ),
    Capability(
        "Stop, resume, keep the best",
        "training/checkpoint training/ema stop_signals",
        *("train pretrain tune", TASKS, DATA, "torch"),
        tests="training/checkpoint commands/interruptions training/test_old_run training/disks",
    ),
    Capability(
        "Several processes and GPUs",
        "training/distributed training/sync_batch_norm",
        *("train pretrain predict", TASKS, DATA, "torch"),
        tests="training/distributed commands/test_predict_processes training/children",
    ),
    Capability(
        "Logs, trackers, progress", "training/logging event_log commands/command_output", "train",
        TASKS, DATA, "torch",
    ),
    Capability(
        "Read images",
        "data/instrument_images data/image_io "
        "data/image_objects data/intensity_range data/preprocessing",
        *("", TASKS, DATA, "torch onnx openvino"),
        tests="data/test_dicom data/test_channel_image",
    ),
    Capability(
        "Augment",
        "data/transforms data/auto_augment data/batched_transform data/mixup",
        *("train pretrain", TASKS, DATA, "torch"),
        tests="commands/test_show_batch",
    ),
    Capability(
        "Load batches: sampler, workers, caches", "data", "train pretrain", TASKS, DATA, "torch",
        "data",
    ),
    Capability(
        "Folders of images, and any source by name",
        "data/sources",
        *("", TASKS, "folder"),
        tests="data/sources",
    ),
    Capability(
        "Lists: CSV, JSONL, XLSX",
        "data/sources/image_list data/sources/list_columns data/sources/list_files "
        "data/sources/list_formats data/sources/table_reader data/sources/image_name_lookup "
        "data/sources/label_review data/workbook",
        *("", TASKS, "list"),
    ),
    Capability(
        "Tar shards",
        "data/sources/tar_shards data/image_archives",
        *("", TASKS, "shards"),
        tests="training/test_training_from_shards",
    ),
    Capability(
        "Datasets of Hugging Face",
        "data/sources/huggingface_datasets",
        *("", TASKS, "hub"),
    ),
    Capability(
        "Built-in datasets",
        "data/sources/builtin_datasets",
        *("demo", "classify caption", "builtin"),
    ),
    Capability(
        "Hold out validation images",
        "data/sources/train_val_split data/sources/split_file data/sources/scene_groups "
        "data/sources/image_sources",
        *("train", TASKS, DATA),
    ),
    Capability(
        "Write data as a folder or shards",
        "data/sources/dataset_export commands/data_command",
        *("data", LABELS, DATA),
    ),
    Capability(
        "Find faults of a dataset",
        "data/checks inference/label_errors evaluation/confident_learning evaluation/data_pages "
        "data/contact_sheet commands/check_command",
        *("check", LABELS, DATA, "torch"),
        "data/checks",
    ),
    Capability(
        "Suggest images to label",
        "inference/suggest commands/suggest_command",
        *("suggest", TASKS, "folder list", "torch"),
    ),
    Capability(
        "Predict",
        "inference output commands/predict_command",
        *("predict", LABELS, "folder list shards hub", "torch onnx openvino"),
        "inference output commands/test_predict_embeddings commands/test_predict_engines "
        "commands/test_predict_resume commands/test_predict_sorting",
    ),
    Capability(
        "Predict and serve on a cluster (Ray)",
        "inference/ray_inference serving/ray_deployment",
        *("predict serve", LABELS, "list", "torch onnx openvino"),
        "inference/ray_child",
    ),
    Capability(
        "Run exported files without torch", "exported", "predict evaluate serve", LABELS,
        "folder list", FILES, "exported",
    ),
    Capability(
        "Explain predictions",
        "inference/attribution inference/attribution_plot ",
        *("predict", LABELS, "folder list", "torch"),
    ),
    Capability(
        "Serve over HTTP",
        "serving commands/serve_command",
        *("serve", LABELS, "", "torch onnx openvino"),
        "serving",
    ),
    Capability(
        "KServe protocol",
        "serving/kserve_protocol",
        *("serve export", LABELS, "", "torch onnx openvino"),
    ),
    Capability(
        "Evaluate: metrics with intervals, slices",
        "evaluation inference/evaluate data/corruptions commands/evaluate_command",
        *("evaluate", LABELS, DATA, "torch onnx openvino"),
        "evaluation",
    ),
    Capability(
        "Trust scores: calibration, thresholds, sets",
        "inference/calibrate score_calibration evaluation/fit_calibration "
        "evaluation/temperature_scaling evaluation/selective_prediction "
        "commands/calibrate_command",
        *("calibrate", CLASSES, DATA, "torch onnx openvino export"),
        "export/test_export_calibration",
    ),
    Capability(
        "Reject images unlike those of training",
        "model/feature_distance",
        *("train calibrate", tasks_with("measures_distance"), DATA, "torch onnx openvino export"),
    ),
    Capability(
        "Notice images that differ from the calibration's",
        "calibration_reference evaluation/drift_detection inference/drift "
        "commands/drift_command",
        *("drift serve", tasks_with("measures_distance"), "folder list", "torch"),
    ),
    Capability(
        "Compare networks",
        "inference/compare evaluation/paired_comparison evaluation/exact_tests "
        "evaluation/metric_rows commands/compare_command",
        *("compare", LABELS, DATA, "torch onnx openvino"),
        "evaluation/test_comparison_page",
    ),
    Capability(
        "Reports, and runs in one table",
        "evaluation/run_report evaluation/runs_table evaluation/charts evaluation/html_page "
        "training/final_report commands/report_command commands/runs_command",
        *("report runs", TASKS, DATA, "torch"),
        "evaluation/test_pages_in_browser",
    ),
    Capability(
        "The network and its options",
        "model config/model_config config/presets commands/models_command",
        *("models", TASKS, "", "torch onnx openvino export"),
        "model",
    ),
    Capability(
        "Mixture of experts",
        "model/moe model/grouped_linear training/moe_losses weights/sparse_upcycling",
        *("train", TASKS, DATA, "torch onnx openvino export"),
        "training/finetune/test_upcycled_experts",
    ),
    Capability(
        "Fewer or other tokens: merging, packing, several patch sizes",
        "model/token_merging model/sequence_packing model/patch_dropout",
        *("train predict", LABELS, DATA, "torch"),
    ),
    Capability(
        "Parameters, FLOPs, memory of a network",
        "evaluation/model_summary commands/summary_command",
        *("summary", LABELS, "", "torch"),
        "test_operation_counts",
    ),
    Capability(
        "Open weights of timm, Hugging Face, JAX, torchvision",
        "weights",
        *("train predict evaluate", LABELS, "", "torch"),
        "weights",
    ),
    Capability(
        "Convert to timm and Hugging Face",
        "weights/convert "
        "weights/formats/huggingface_writer weights/formats/huggingface_classes "
        "weights/formats/timm_conv_stem commands/convert_command",
        *("convert", LABELS, "", "torch"),
    ),
    Capability(
        "Export",
        "export commands/export_command",
        *("export", LABELS, DATA, formats_of_export),
        "export",
    ),
    Capability(
        "8 bits and half precision",
        "export/quantization export/float16",
        *("export", CLASSES, DATA, FILES),
    ),
    Capability(
        "OpenVINO", "export/export_openvino exported/openvino_session", "export predict serve",
        CLASSES, "", "openvino",
    ),
    Capability(
        "Prove that a file is its run",
        "export/verification export/sample_images commands/verify_command",
        *("verify", LABELS, "folder list", "torch onnx openvino"),
    ),
    Capability(
        "Command line, Python functions, messages, devices",
        "__init__ __main__ version errors atomic_files json_reader text paths precision "
        "process_resources quick_imports commands config/setting_layers config/collect_settings "
        "config/settings config/stored_config",
        tests="commands conftest markers processor slow_cases test_architecture test_size "
        "test_features",
    ),
    Capability(
        "Documentation, examples, packaging", "",
        tests="test_documents test_documentation_site test_examples test_notebooks test_tour "
        "test_packaging test_container test_benchmarks test_windows",
    ),
)  # fmt: skip


def nearest_owner(path: str, names: dict[str, str]) -> str:
    """The capability in `names` that has `path` or the nearest folder around it; else ""."""
    while path and path not in names:
        path = path.rpartition("/")[0]
    return names.get(path, "")


def owners(root: Path) -> dict[Path, str]:
    """Each file of vit/ and tests/ -> its capability; "" where it has none."""
    files = {name: one.name for one in CAPABILITIES for name in one.files.split()}
    tests = {name: one.name for one in CAPABILITIES for name in one.tests.split()}
    found = {}
    for file in sorted((root / "vit").rglob("*.py")):
        found[file] = nearest_owner(_stem(file, root / "vit"), files)
    mirrored = {_stem(file, root / "vit"): name for file, name in found.items()}
    for file in sorted((root / "tests").rglob("*.py")):
        stem = _stem(file, root / "tests")
        mirror = stem.replace("test_", "")
        known = tests.get(stem) or mirrored.get(mirror)
        found[file] = known or nearest_owner(stem, tests)
    return found


def _stem(file: Path, folder: Path) -> str:
    return file.relative_to(folder).with_suffix("").as_posix()


def stale_names(root: Path) -> list[str]:
    """Names of the table that are neither a file nor a folder, and names that stand twice."""
    stale = []
    for folder, column in (("vit", "files"), ("tests", "tests")):
        names = [name for one in CAPABILITIES for name in getattr(one, column).split()]
        stale += [f"{folder}/{name} stands twice" for name in {*names} if names.count(name) > 1]
        for name in names:
            path = root / folder / name
            if not any(path.glob("**/*.py")) and not path.with_name(f"{path.name}.py").is_file():
                stale.append(f"{folder}/{name} is not there")
    return stale


class Cost(NamedTuple):
    """Size of a capability."""

    files: list[str]
    lines: int
    tests: int
    """Lines of its tests."""


def costs(root: Path) -> dict[str, Cost]:
    """The cost of each capability."""
    owned = owners(root)
    found = {}
    for one in CAPABILITIES:
        files = [file for file, name in owned.items() if name == one.name]
        lines = {file: file.read_text(encoding="utf-8").count("\n") for file in files}
        ours = [file for file in files if file.is_relative_to(root / "vit")]
        total = sum(lines[file] for file in ours)
        names = [file.stem for file in ours if not file.stem.startswith("__")]
        found[one.name] = Cost(names, total, sum(lines.values()) - total)
    return found


def _rounded(lines: int) -> str:
    return f"{max(ROUNDING * round(lines / ROUNDING), ROUNDING if lines else 0):,}"


def page(root: Path) -> str:
    """The text of docs/features.md."""
    measured = costs(root)
    columns = [name for names in SUPPORT.values() for name in names]
    support = [f"| capability | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    size = ["| capability | commands | lines | tests | files |", "|---|---|---|---|---|"]
    for one in CAPABILITIES:
        cost = measured[one.name]
        cells = []
        for kind, names in SUPPORT.items():
            stated = getattr(one, kind)
            known = (stated() if callable(stated) else stated).split()
            cells += ["yes" if name in known else " " for name in names]
        support.append(f"| {one.name} | {' | '.join(cells)} |")
        commands = ", ".join(f"`{name}`" for name in one.commands.split())
        files = ", ".join(f"`{name}`" for name in cost.files)
        lines = f"{_rounded(cost.lines)} | {_rounded(cost.tests)}"
        size.append(f"| {one.name} | {commands} | {lines} | {files} |")
    return "\n".join(
        [
            "# Capabilities",
            "",
            "What the toolkit does, where it works, and what it costs. Written by `python -m "
            "tools.features`; a test compares it with the code.",
            "A change that adds more than 500 lines to a capability says in its commit what it "
            "took away.",
            "",
            "## Support",
            "",
            "By task, source of data, and engine (`hub` is Hugging Face's, `export` is "
            "torch.export). An empty cell is not supported, or has no meaning.",
            "",
            *support,
            "",
            "## Cost",
            "",
            f"Lines of `vit/` and of their tests, in multiples of {ROUNDING}.",
            "",
            *size,
            "",
        ]
    )


if __name__ == "__main__":
    unowned = [f"{path} has no capability" for path, name in owners(ROOT).items() if not name]
    if wrong := stale_names(ROOT) + unowned:
        raise SystemExit("\n".join(["correct CAPABILITIES in tools/features.py:", *wrong]))
    PAGE.write_text(page(ROOT), encoding="utf-8")

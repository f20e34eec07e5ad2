"""`train(config, out)`: from settings and images to a run folder.

settings + weights + data + devices -> resolve() -> final settings, splits
-> network, optimiser, loaders -> Trainer: epochs, validation, checkpoints
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from vit.atomic_files import write_text
from vit.config import Config
from vit.config.collect_settings import call_settings
from vit.config.setting_layers import Settings, default_run_folder, make_config, with_origins
from vit.config.stored_config import stored_config
from vit.config.user_code import UserCode
from vit.data.dataset_types import Splits
from vit.data.sources.open_dataset import Listing, check_source_exists
from vit.errors import ConfigError, RunError, VitError, is_out_of_memory
from vit.evaluation.run_report import BACKBONES_FILE
from vit.stop_signals import Interruption
from vit.tasks.task import get_task
from vit.text import Notify, printable
from vit.training.auto_batch_size import fit_memory, note_many_tokens
from vit.training.checkpoint.run_folder import (
    check_run_folder,
    lock_folder,
    require_same_settings,
    with_stored_settings,
    write_new_run,
)
from vit.training.distributed.collectives import on_main
from vit.training.distributed.devices import make_accelerator
from vit.training.finetune.finetune_settings import complete_for_weights, wants_other_vocabulary
from vit.training.finetune.linear_probe import init_head_from_probe
from vit.training.loader_autotune import choose_workers, with_cache
from vit.training.logging.environment import record_environment
from vit.training.logging.trackers import require_tracker
from vit.training.logging.training_progress import notifier, notify_on_main
from vit.training.lr_schedule import total_steps
from vit.training.plan import (
    check_plannable,
    is_planned,
    plan_training,
    summary_lines,
    with_chosen_weights,
    with_planned_cache,
    with_target_task,
)
from vit.training.plan_rules import Plan
from vit.training.settings_from_data import check_channels, prepare_data
from vit.training.setup import make_network, make_training
from vit.training.teacher import with_teacher
from vit.training.time_budget import TimeBudget, fit_time
from vit.training.trainer import Trainer, TrainingResult
from vit.training.training_loaders import make_schedule
from vit.weights.formats.pretrained import Pretrained
from vit.weights.load_model import describe_source, open_pretrained, preprocessing_or_default
from vit.weights.resolve_source import locate_weights

ECHO_SECONDS = 3.0
NO_CODE = UserCode()


class OuterCommand(NamedTuple):
    """A command that trains as a part of its work."""

    name: str
    folder: Path
    """Which resumes it."""
    claimed: Callable[[], None] | None = None
    """Called in the main process once nothing refuses the training any more and its folder is
    locked, before anything is written there."""


def train(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    began: float | None = None,
    part_of: OuterCommand | None = None,
    report: bool = True,
    callbacks: Sequence[Any] = (),
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    transform: Callable[[Tensor, torch.Generator], Tensor] | None = None,
    **settings: Any,
) -> TrainingResult:
    """Train a network, and write a run folder: `vit train`.

        vit.train("photos/", "runs/photos", time="20m")
        vit.train("plan.yaml", "runs/photos", lr=5e-4)
        vit.train(out="runs/photos", resume=True)

    Args:
        config: DATA: a folder, a list, or the name of a dataset; or a YAML file of settings, which
            names it. Or settings by name, such as {"data": "photos", "time": "20m"}. The plan
            decides the settings that are missing, as in `vit train`. A Config of
            `vit.make_config` is used as it is.
        out: The run folder; `runs/<name of the data>` if omitted.
        resume: Continue from the newest checkpoint in `out`, or start a new one.
        overwrite: Delete the run in `out` first.
        began: Start of the time of `config.training.time`, by `time.monotonic`; now if omitted.
        part_of: The command that trains, if it is another one than `vit train` of `out`.
        report: Whether to choose thresholds and write report.html at the end.
        callbacks: Objects with after_step(run, step), after_validation(run, scores) or
            at_end(run, result); `run` is a vit.training.callbacks.CallbackRun.
        loss: The training loss: (logits, targets), both (batch, classes) -> (batch,); targets are
            shares of classes after MixUp and CutMix. Of numbers see docs/own-code.md.
        transform: (image, generator) -> image, uint8 (3, height, width), after augmentation.
        settings: More settings by name, unless `config` is a Config.

    Raises:
        VitError: An error that the user can fix; the message has the remedy.
    """
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks={callbacks!r}: give a list of objects")
    code = UserCode(callbacks=tuple(callbacks), loss=loss, transform=transform)
    began = time.monotonic() if began is None else began
    claimed = None if part_of is None else part_of.claimed
    config = call_settings(config, settings, out=out, resume=resume, notify=notify_on_main)
    data = config.get("data")
    if isinstance(data, str) and os.environ.get("WORLD_SIZE", "1") == "1":
        # a first time, before the plan measures anything
        place = Path(out or default_run_folder(data))
        check_run_folder(place, resume=resume, overwrite=overwrite)
    config, listing = resolve_plan(config)
    require_tracker(config.run.track)
    check_channels(config.model.channels, config.data.value_type)
    accelerator = make_accelerator(config.run)
    notify = notifier(accelerator)
    folder = Path(out or default_run_folder(config.data.data))
    check = partial(check_run_folder, folder, resume=resume, overwrite=overwrite)
    resumed = folder if on_main(accelerator, check) else None
    if resume and resumed is None:
        notify(f"note: no run in {printable(folder)} yet: starting one")
    if resumed is not None:
        code.require_same(resumed)
    resolved = resolve(config, accelerator, resumed, began=began, listing=listing, code=code)
    config, splits = resolved.config, resolved.splits  # final, but for the end of a time budget
    resuming = config if resumed is not None else None
    stops = Interruption(
        echo_seconds(), lambda: notify("stopping after this step; a second signal ends at once")
    )
    with translate_errors(resuming), stops as signals, ExitStack() as stack:
        outputs = get_task(config.training.task).output_names(splits)
        network = make_network(config, resolved.source, outputs, notify, splits.tokenizer)
        failed, budget, backbones = resolved.failed, resolved.budget, resolved.backbones
        only_probe = config.finetune.method == "probe"
        begins_with_probe = only_probe or bool(config.finetune.probe_first)
        begins_with_probe = begins_with_probe and resolved.source is not None
        del resolved  # and with it the pretrained weights
        schedule = make_schedule(config, len(splits.train), processes=accelerator.num_processes)
        epoch_steps = 0 if only_probe else schedule.steps_per_epoch
        run = make_training(
            config,
            accelerator,
            total_steps(config, epoch_steps),
            network,
            splits,
            epoch_steps=epoch_steps,
            failed=failed,
            interruption=signals,
            workers_for=choose_workers,
        )
        claim = partial(claim_run_folder, folder, stack, check, config, splits, backbones)
        on_main(accelerator, lambda: claim(new=resumed is None, claimed=claimed))
        probed = init_head_from_probe(run, splits) if begins_with_probe else None
        resumed_by = None if part_of is None else part_of[:2]
        trainer = Trainer(
            run, folder, splits, epoch_steps, budget, resumed_by=resumed_by, report=report
        )
        stack.callback(trainer.close)
        trainer.begin(resumed is not None, probed)
        return trainer.run_all()


def plan(data: Mapping[str, Any] | str | os.PathLike[str], **settings: Any) -> tuple[Config, Plan]:
    """The settings that `train` would choose, each with its reason: `vit plan`.

        config, plan = vit.plan("photos/", time="20m")
        vit.train(config, "runs/photos")

    Args:
        data: As for `train`, except a Config.
        settings: More settings by name.

    Returns:
        Settings, with which `train` follows the plan, and the plan.

    Raises:
        VitError: An error that the user can fix; the message has the remedy.
    """
    chosen = call_settings(data, settings)
    if isinstance(chosen, Config):
        raise ConfigError("a Config is complete, and leaves nothing to plan: give DATA or settings")
    check_plannable(chosen)
    return plan_training(chosen)


def resolve_plan(settings: Config | Settings) -> tuple[Config, Listing | None]:
    """Make a Config of settings; the plan decides those that are missing, where it applies, and the
    data as listed for the plan are returned too."""
    if isinstance(settings, Config):
        return with_origins(settings), None
    settings = with_target_task(settings)
    if settings.complete or not is_planned(settings):
        return make_config(settings), None
    config, plan = plan_training(settings)
    for line in summary_lines(plan):
        notify_on_main(line)
    return config, plan.listing


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A run whose settings are final, and the data and weights that decided them."""

    config: Config
    """The completed settings, which config.yaml records."""
    splits: Splits
    """The images, without unreadable ones."""
    failed: dict[str, str]
    """Images that cannot be read, with the reason."""
    source: Pretrained | None
    backbones: Mapping[str, Any] | None
    """What was measured of networks for --weights auto."""
    budget: TimeBudget | None
    """The time budget that chose the number of steps, and may change it during the cooldown."""


def resolve(
    config: Config,
    accelerator: Accelerator,
    resumed: Path | None = None,
    *,
    began: float,
    listing: Listing | None = None,
    code: UserCode = NO_CODE,
) -> ResolvedRun:
    """Complete the settings of a run from its plan, weights, data and devices, in this order."""
    notify = notifier(accelerator)
    config, planned = with_chosen_weights(config, accelerator, resumed)
    listing = listing if planned is None else planned.listing
    backbones = None if planned is None else planned.backbones
    source = None
    if resumed is not None:  # its checkpoint has the weights
        if config.data.accumulate is None and config.chosen("accumulate"):
            kept = stored_config(resumed).data.accumulate
            keeps = f"the run keeps accumulate={kept}; --accumulate changes it"
            notify(f"note: -b auto is not used: {keeps}")
        config = with_stored_settings(config, resumed)
    elif config.finetune.weights is not None:
        source = load_source(config, accelerator, notify)
        config = complete_for_weights(config, source, notify)
    decoder = None if source is None else source.decoder
    tokenizer = None
    if decoder is not None and not wants_other_vocabulary(config, decoder):
        tokenizer = decoder.tokenizer
    config, splits, failed = prepare_data(
        config, accelerator, notify, resumed, tokenizer, listing, source
    )
    if resumed is not None:
        require_same_settings(config, resumed, splits)
    if (limit := config.training.time) is not None and config.chosen("epochs"):
        unused = f"epochs={config.training.epochs} is not used"
        notify(f"note: time={limit} chooses the length of the training: {unused}")
    note_many_tokens(config, accelerator, notify)
    if source is not None and "cache" not in config.settled:
        config = with_planned_cache(config, splits, accelerator)
    config = config.with_user_code(code)
    splits = with_cache(config, splits, accelerator, notify)
    with translate_errors(config if resumed is not None else None):
        splits = with_teacher(config, splits, accelerator, notify, resumed)
        config = fit_memory(config, accelerator, notify, splits)
        config, budget = fit_time(
            config, splits, accelerator, notify, began=began, planned=not config.chosen("time")
        )
    return ResolvedRun(
        config=config,
        splits=splits,
        failed=failed,
        source=source,
        backbones=backbones,
        budget=budget,
    )


def load_source(config: Config, accelerator: Accelerator, notify: Notify) -> Pretrained:
    where = config.finetune.weights
    assert where is not None
    if not config.training.captions:
        check_source_exists(config.data.data)  # report a wrong DATA before a download
    # with a `dim` of its own, a preset is only a label, and not the network of a bare state dict
    named = config.chosen("model") and "dim" not in config.settled
    model = config.training.model if named else None
    # one process downloads, the others find the files
    on_main(accelerator, lambda: locate_weights(where))
    try:
        source = open_pretrained(where, model=model)
    except VitError as error:
        # an error on another process only is reported by that process
        error.on_all_processes = accelerator.is_main_process
        raise
    for line in describe_source(where, source):
        notify(line)
    _, assumed = preprocessing_or_default(source)
    if assumed and not {"mean", "std"} <= {*config.settled}:
        notify(
            f"{assumed}; --mean, --std and --crop-share set those of their training: of DINO and "
            "DeiT --mean 0.485 0.456 0.406 --std 0.229 0.224 0.225"
        )
    return source


def claim_run_folder(
    folder: Path,
    stack: ExitStack,
    check: Callable[[], bool],
    config: Config,
    splits: Splits,
    backbones: Mapping[str, Any] | None = None,
    *,
    new: bool,
    claimed: Callable[[], None] | None = None,
) -> None:
    """Lock `folder` until `stack` closes, and write settings of a new run and environment.jsonl."""
    stack.enter_context(lock_folder(folder))
    if check() == new:
        raise RunError(f"a run began in {folder} meanwhile: start again")
    if claimed is not None:
        claimed()
    if new:
        write_new_run(folder, config, splits)
        if backbones:
            text = json.dumps(backbones, indent=1, allow_nan=False) + "\n"
            write_text(folder / BACKBONES_FILE, text)
    record_environment(folder)


def echo_seconds() -> float:
    """Time in which a second signal is ignored: launchers forward the signal they receive."""
    return ECHO_SECONDS if "WORLD_SIZE" in os.environ else 0.0


@contextlib.contextmanager
def translate_errors(resuming: Config | None = None) -> Iterator[None]:
    """Raise errors of the machine, such as full memory, as RunError with a remedy."""
    try:
        yield
    except RuntimeError as error:
        message = remedy(error, resuming)
        if message is None:
            raise
        failure = RunError(message)
        failure.on_all_processes = False  # a single process may meet it
        raise failure from None


def remedy(error: RuntimeError, resuming: Config | None = None) -> str | None:
    """Message and remedy of an error that the machine causes; None for any other error."""
    text = str(error)
    if is_out_of_memory(error) and resuming is not None:
        less = "--checkpoint-activations"
        if not get_task(resuming.training.task).compares_images:
            more = resuming.data.micro_batches
            less = f"an --accumulate of more than {more}, which splits a step's batch, or {less}"
        return f"out of memory: resume with {less}; other settings need a new run"
    if is_out_of_memory(error):
        return (
            "out of memory: -b auto or a larger --accumulate splits a step's batch; or use "
            "--checkpoint-activations, a smaller --model or --image-size"
        )
    if "deterministic implementation" in text:
        return f"--deterministic: {printable(text.splitlines()[0])[:160]}; leave it out"
    if isinstance(error, torch.distributed.DistError) or "gloo" in text.lower():
        return (
            "lost another process of this training, which may have said why "
            f"({printable(text.splitlines()[0])[:120]}); go on with --resume"
        )
    return None

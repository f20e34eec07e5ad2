"""`train(config, out)`: from settings and images to a run folder.

settings + data -> splits -> completed settings -> network, optimiser, loaders
each epoch: steps -> validation -> metrics.jsonl, model.safetensors if best -> checkpoint

What a training ended with.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator

from vit.config import Config
from vit.config.parser import changed_settings, default_run_folder
from vit.data.captions.tokenizer import Tokenizer
from vit.data.dataset_types import Splits
from vit.data.sources.open_dataset import Listing, check_source_exists
from vit.errors import RunError, VitError, printable
from vit.training.auto_batch_size import fit_memory
from vit.training.collectives import on_main
from vit.training.data_setup import check_channels, look_at_data
from vit.training.devices import make_accelerator
from vit.training.finetuning import complete_for_weights, wants_other_vocabulary
from vit.training.linear_probe_init import init_head_from_probe
from vit.training.loader_autotune import measured_workers, with_cache
from vit.training.lr_schedule import total_steps
from vit.training.plan import with_chosen_weights
from vit.training.run_folder import (
    claim_folder,
    look_at_folder,
    require_same_settings,
    settled,
    write_start,
)
from vit.training.setup import make_network, make_training
from vit.training.stop_signals import Interruption
from vit.training.time_budget import TimeBudget, fit_time
from vit.training.trackers import require_tracker
from vit.training.trainer import Trainer, TrainingResult
from vit.training.training_loaders import make_schedule
from vit.training.training_progress import teller
from vit.weights.load_model import describe_source, open_pretrained
from vit.weights.pretrained import Pretrained
from vit.weights.resolve_source import locate_weights

ECHO_SECONDS = 3.0


def train(
    config: Config,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    given: Sequence[str] | None = None,
    began: float | None = None,
    listing: Listing | None = None,
    resumed_by: tuple[str, Path] | None = None,
    report: bool = True,
) -> TrainingResult:
    """Train a network, and leave everything about it in a run folder.

    Args:
        config: Settings; `config.data.data` names the images.
        out: The run folder; `runs/<name of the data>` where left out.
        resume: Continue from the newest checkpoint in `out`; begin where there is none.
        overwrite: Delete the run that is in `out`.
        given: Names of settings that somebody chose; those that differ from their default where
            left out. Pretrained weights and the data decide others.
        began: When the time of `config.training.time` began, by `time.monotonic`; now if left out.
        listing: `Plan.listing`, so that data which were planned with are not listed again.
        resumed_by: The command and the folder that continue it, where it is a part of more; `vit
            train` and `out` where left out.
        report: Whether it ends with report.html, and with thresholds where it has some.

    Raises:
        VitError: Something the caller can mend: see the message.
    """
    began = time.monotonic() if began is None else began
    given = changed_settings(config) if given is None else given
    require_tracker(config.run.track)
    check_channels(config.model.channels)
    accelerator = make_accelerator(config.run)
    folder = Path(out or default_run_folder(config.data.data))
    look = partial(look_at_folder, folder, resume=resume, overwrite=overwrite)
    begun = folder if (resuming := on_main(accelerator, look)) else None
    if resume and not resuming:
        teller(accelerator)(f"note: no run in {printable(folder)} yet: starting one")
    config, given, chosen = with_chosen_weights(config, given, accelerator, begun)
    config, source = look_at_weights(config, given, accelerator, begun)
    known = known_words(config, source, given)
    config, splits, failed, budget = complete_settings(
        config, given, accelerator, begun, began, known, chosen or listing
    )
    listing = chosen = None  # the splits have all that is needed of them
    with mendable(), Interruption(echo_seconds()) as signals, contextlib.ExitStack() as stack:
        network = make_network(
            config, source, splits.classes, teller(accelerator), splits.tokenizer
        )
        fresh, source = source is not None, None  # its tensors are in the network now
        steps = steps_of_epoch(config, splits, accelerator)
        run = make_training(
            config, accelerator, total_steps(config, steps), network, splits, epoch_steps=steps
        )
        run.failed, run.interruption = failed, signals
        run.workers = measured_workers(run, splits.train)
        on_main(accelerator, lambda: claim(folder, stack, look, begun, config, splits))
        probed = init_head_from_probe(run, splits) if fresh and probes(config) else None
        session = Trainer(run, folder, splits, steps, budget, resumed_by=resumed_by, report=report)
        stack.callback(session.close)
        session.begin(resuming, probed)
        return session.run_all()


def claim(
    folder: Path,
    stack: contextlib.ExitStack,
    look: Callable[[], bool],
    begun: Path | None,
    config: Config,
    splits: Splits,
) -> None:
    """Make `folder` ours until `stack` ends, and write how the run starts where it does.

    Raises:
        RunError: Another process has it, or began a run there since it was looked at.
    """
    stack.enter_context(claim_folder(folder))
    if look() != (begun is not None):
        raise RunError(f"a run began in {printable(folder)} meanwhile: start again")
    if begun is None:
        write_start(folder, config, splits)


def probes(config: Config) -> bool:
    """Whether a head is fitted to features before the first step, or instead of all."""
    return config.finetune.method == "probe" or bool(config.finetune.probe_first)


def known_words(
    config: Config, source: Pretrained | None, given: Sequence[str]
) -> Tokenizer | None:
    """The tokenizer that comes with the weights, where nobody chose other words."""
    if (
        source is None
        or source.decoder is None
        or wants_other_vocabulary(config, source.decoder, given)
    ):
        return None
    return source.decoder.tokenizer


def steps_of_epoch(config: Config, splits: Splits, accelerator: Accelerator) -> int:
    """Optimiser steps of an epoch; none where fitting a head is all that is done."""
    processes = accelerator.num_processes
    schedule = make_schedule(config, len(splits.train), processes=processes)
    return 0 if config.finetune.method == "probe" else schedule.steps_per_epoch


def look_at_weights(
    config: Config, given: Sequence[str], accelerator: Accelerator, begun: Path | None
) -> tuple[Config, Pretrained | None]:
    """The settings completed with what the pretrained weights decide, and those weights.

    A run that is resumed has what came of them in its checkpoint: they may be gone.

    Raises:
        DataError: There is no such data.
        WeightsError: They cannot be found, read or used.
        ConfigError: Settings contradict them.
    """
    where = config.finetune.weights
    if where is None or begun is not None:
        return config, None
    if not config.training.captions:
        check_source_exists(
            config.data.data
        )  # a mistake in DATA is told before anything is fetched
    # a preset beside its own dim is a name that some run was given, not the network of a bare file
    model = config.training.model if "model" in given and "dim" not in given else None
    on_main(
        accelerator, lambda: locate_weights(where)
    )  # one process downloads, the others find the files
    try:
        source = open_pretrained(where, model=model)
    except VitError as error:
        error.on_all_processes = (
            accelerator.is_main_process
        )  # what the others alone meet, they tell
        raise
    tell = teller(accelerator)
    for line in describe_source(where, source):
        tell(line)
    return complete_for_weights(config, source, given), source


def echo_seconds() -> float:
    """How long a signal may come twice: where there is a launcher, it hands its own on."""
    return ECHO_SECONDS if "WORLD_SIZE" in os.environ else 0.0


def complete_settings(
    config: Config,
    given: Sequence[str],
    accelerator: Accelerator,
    begun: Path | None,
    began: float,
    known: Tokenizer | None = None,
    listing: Listing | None = None,
) -> tuple[Config, Splits, dict[str, str], TimeBudget | None]:
    """The settings of a run with all that data, memory and time say of them.

    Args:
        config: As asked for.
        given: Names of the settings that somebody chose.
        accelerator: The devices.
        begun: Folder of the run that is resumed, whose settings these must be.
        began: When the time of `config.training.time` began.
        known: The tokenizer of the weights that are trained on, where they write captions.
        listing: What the data hold, where they were listed for a plan.

    Returns:
        Settings, the images, those that cannot be read with the reason, and the time budget.
    """
    tell = teller(accelerator)
    if begun is not None:
        config = settled(config, begun, given)
    config, splits, failed = look_at_data(config, given, accelerator, tell, begun, known, listing)
    if begun is not None:
        require_same_settings(config, begun)
    splits = with_cache(config, splits, accelerator, tell)
    with mendable():
        config = fit_memory(config, accelerator, tell, splits)
        config, budget = fit_time(config, splits, accelerator, tell, began=began)
    return config, splits, failed, budget


@contextlib.contextmanager
def mendable() -> Iterator[None]:
    """Turn errors of the machine into errors with a remedy; one process alone may meet them."""
    try:
        yield
    except RuntimeError as error:
        told = remedy(error)
        if told is None:
            raise
        failure = RunError(told)
        failure.on_all_processes = False
        raise failure from None


def remedy(error: RuntimeError) -> str | None:
    """What to say of an error that the machine is to blame for; None of any other."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in text:
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

"""`train(config, out)`: from settings and pictures to a run folder.

settings + data -> splits -> completed settings -> network, optimiser, loaders
each epoch: steps -> validation -> metrics.jsonl, model.safetensors if best -> checkpoint
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from vit.config import Config
from vit.errors import DataError, RunError, printable
from vit.settings import default_folder
from vit.training.agreement import on_main
from vit.training.batches import make_schedule
from vit.training.devices import make_accelerator
from vit.training.interruption import Interruption
from vit.training.progress import say
from vit.training.run_folder import (
    claim_folder,
    look_at_folder,
    require_same_settings,
    write_start,
)
from vit.training.session import Session, TrainingResult
from vit.training.setup import look_at_data, make_training


def train(
    config: Config,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    given: Sequence[str] = (),
) -> TrainingResult:
    """Train a network, and leave everything about it in a run folder.

    Args:
        config: Settings; `config.data.data` names the pictures.
        out: The run folder; `runs/<name of the data>` where left out.
        resume: Continue from the newest checkpoint in `out`; begin where there is none.
        overwrite: Delete the run that is in `out`.
        given: Names of settings that somebody chose rather than left at their default.

    Raises:
        VitError: Something the caller can mend: see the message.
    """
    accelerator = make_accelerator(config.run)
    tell = say if accelerator.is_main_process else lambda _: None
    folder = Path(out or default_folder(config.data.data))
    resuming = on_main(
        accelerator, lambda: look_at_folder(folder, resume=resume, overwrite=overwrite)
    )
    config, splits, failed = look_at_data(config, given, accelerator, tell)
    schedule = make_schedule(config, len(splits.train), processes=accelerator.num_processes)
    if resuming:
        require_same_settings(config, folder)
    elif resume:
        tell(f"note: no run in {printable(folder)} yet: starting one")
    with mendable(), Interruption() as interruption, contextlib.ExitStack() as stack:
        run = make_training(config, accelerator, config.training.epochs * schedule.steps_per_epoch)
        run.failed, run.interruption = failed, interruption

        def claim() -> None:
            stack.enter_context(claim_folder(folder))
            if not resuming:
                write_start(folder, config, splits)

        on_main(accelerator, claim)
        session = Session(run, folder, splits, schedule.steps_per_epoch, interruption)
        stack.callback(session.close)
        session.begin(resuming)
        return session.run_all()


@contextlib.contextmanager
def mendable() -> Iterator[None]:
    """Turn errors of the machine into errors with a remedy; one process alone may meet them."""
    try:
        yield
    except DataError as error:
        error.everywhere = False
        raise
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        full = RunError(
            "out of memory: lower --batch-size, raise --accumulate, or take a smaller --model or "
            "--image-size"
        )
        full.everywhere = False
        raise full from None

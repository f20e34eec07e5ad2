"""`train(config, out)`: from settings and pictures to a run folder.

settings + data -> splits -> completed settings -> network, optimiser, loaders
each epoch: steps -> validation -> metrics.jsonl, model.safetensors if best -> checkpoint
"""

from collections.abc import Sequence
from pathlib import Path

from accelerate.utils import broadcast_object_list

from vit.config import Config
from vit.data.sources import open_splits
from vit.errors import BadImage
from vit.training.batches import make_schedule
from vit.training.interruption import Interruption
from vit.training.progress import say
from vit.training.run_folder import default_folder, prepare_folder, write_start
from vit.training.session import Session, TrainingResult
from vit.training.setup import (
    complete,
    fit_batch_size,
    make_accelerator,
    make_training,
    readable,
)


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
    accelerator = make_accelerator(config.training)
    tell = say if accelerator.is_main_process else lambda _: None
    folder, data = Path(out or default_folder(config.data.data)), config.data
    splits = open_splits(data.data, val_share=data.val_share, seed=config.training.seed)
    config = complete(config, splits, given)
    splits = readable(splits, config, accelerator)
    for note in splits.notes:
        tell(f"note: {note}")
    config = fit_batch_size(config, len(splits.train), accelerator.num_processes, tell)
    schedule = make_schedule(config, len(splits.train), processes=accelerator.num_processes)
    steps = schedule.steps_per_epoch
    resuming = [False]
    if accelerator.is_main_process:
        resuming = [prepare_folder(folder, config, resume=resume, overwrite=overwrite)]
        if not resuming[0]:
            write_start(folder, config, splits)
    broadcast_object_list(resuming)
    run = make_training(config, accelerator, config.training.epochs * steps)
    with Interruption() as interruption:
        session = Session(run, folder, splits, steps, interruption)
        try:
            session.begin(resuming[0])
            return session.run_all()
        except BadImage as error:
            error.everywhere = False
            raise
        finally:
            session.close()

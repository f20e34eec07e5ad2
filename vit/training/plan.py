"""From data, device and time to the settings of a run, where nobody chose a network or a recipe.

open data -> facts (images, sizes, colours) -> speed of this machine, measured -> rules -> settings
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator

from vit.config import Config, DataConfig, SourceConfig
from vit.config.decoder_config import DecoderConfig
from vit.config.model_config import ModelConfig
from vit.config.setting_layers import (
    Settings,
    as_typed_flag,
    known_origins,
    make_config,
    settings_with,
    with_settings,
)
from vit.config.settings import PRETRAINING_TASKS
from vit.config.stored_config import stored_config
from vit.config.training_config import TASKS, TrainingConfig, download_limit
from vit.data.captions.caption_ids import DEFAULT_MAX_TOKENS, CaptionIds
from vit.data.captions.tokenizer import default_vocab_size, train_tokenizer
from vit.data.dataset_types import Sample, Splits
from vit.data.device_cache import free_device_memory
from vit.data.image_cache import free_bytes
from vit.data.image_io import check_header, read_pixels, read_size
from vit.data.intensity_range import choose_channels
from vit.data.preprocessing import Preprocessing
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import Listing, image_groups, text_targets
from vit.errors import BadImage, ConfigError, RunError
from vit.evaluation.model_summary import cost_of
from vit.model.build import assemble_decoder
from vit.tasks.task import get_task
from vit.text import format_duration, join_names, plural
from vit.training.backbone_selection import (
    TOO_SLOW,
    VERSION,
    Tournament,
    read_record,
    record_file,
    table_lines,
)
from vit.training.distributed.collectives import min_over_processes, on_main
from vit.training.distributed.devices import make_accelerator
from vit.training.distributed.fsdp import is_sharded
from vit.training.finetune.finetune_settings import run_of
from vit.training.logging.training_progress import notifier, notify_on_main
from vit.training.plan_rules import (
    PHOTO_NETWORKS,
    TINY_SIDE,
    CaptionStats,
    Choice,
    Facts,
    Network,
    Plan,
    TimedNetwork,
    affordable_passes,
    counted_passes,
    decide_cache,
    flops_with_captions,
    image_side,
    ladder_for,
    make_plan,
    needed_passes,
    planned_seconds,
    usual_batch,
    with_chosen,
)
from vit.training.plan_weights import (
    MANY_LABELS,
    Rules,
    WeightsChoice,
    architecture_settings,
    plan_after_pretraining,
    plan_weights,
)
from vit.training.settings_from_data import (
    check_channels,
    group_finder,
    list_data,
    open_data,
    refuse_for_channels,
    takes_channels,
)
from vit.training.trial_training import (
    PLAN_HEADROOM,
    Measure,
    limit_gpu_memory,
    measure_speed,
)
from vit.weights.backbone_list import LISTED, fetch_backbones, find_backbones, license_name
from vit.weights.saved_model import read_pretraining_run

SHARED_MEMORY = Path("/dev/shm")
# Images whose headers are read, and those that are decoded to see whether they have colours.
HEADERS, DECODED = 64, 12
# Captions that a tokenizer is trained on to learn how many tokens they have.
TOKENIZED = 5000
# Large JPEGs are decoded at an eighth of their size, no smaller than this.
LOOKED_AT = (256, 256)
# Long side by short side from which the middle square is too little of an image to be silent about.
LONG = 2.0
# Of an image, as is supposed before they are counted.
PLANNED_TILES = 64
TILE_SETTINGS: dict[str, Any] = {"batch_size": 4, "min_crop": 1.0, "vflip": 0.5}
TILE_SETTINGS |= {"auto_augment": "none", "color_jitter": 0.2, "cache": "none"}
TILE_SETTINGS |= {"resize": "squash", "crop_share": 1.0}  # as vit train sets them
TILE_SETTINGS |= {"start_image_size": None, "mixup": 0.0, "cutmix": 0.0, "erase": 0.0}
"""What the plan takes as given for bags of tiles: small steps, and nothing that hides a mark."""
# A step of this network is timed: like those that the plan chooses, and quick.
PROBE = PHOTO_NETWORKS[1]._replace(passes=0)
# For pretrained weights on a GPU, where it matters, about the network of most of them.
WEIGHTS_PROBE = PHOTO_NETWORKS[6]._replace(passes=0)
# Number of networks of the ladder timed on a CPU; larger ones are taken to be as fast as the last
# of them, and one is timed unless it is out of reach even at this many times the speed of the
# last. On a GPU all are timed that may be in reach.
MEASURED, FASTER = 3, 2.0


TARGET_TASKS = {
    "numbers": ("regression", "classify"),
    "classes": ("classify", "regression"),
    "paths": ("taxonomy", "classify"),
}
"""What the columns `target` hold -> their task, and one that a user may have meant."""


def is_planned(chosen: Mapping[str, Any]) -> bool:
    """Whether these settings leave a plan to make: no model, weights or method."""
    names = ("model", "weights", "method", "probe_first", "lora_rank")
    decided = any(chosen.get(name) is not None for name in names)
    return not decided and chosen.get("task", TrainingConfig.task) in TASKS


def chooses_weights(chosen: Mapping[str, Any]) -> bool:
    """Whether these settings leave the pretrained weights to the plan."""
    return download_limit(chosen.get("weights")) is not None


def pretraining_run(chosen: Mapping[str, Any]) -> tuple[ModelConfig, Preprocessing] | None:
    """The run of `vit pretrain` from which these settings leave it to the plan to go on."""
    one_class = TrainingConfig(task=chosen.get("task", TrainingConfig.task)).single_label
    names = ("model", "method", "probe_first", "lora_rank", "feedforward")
    decided = any(chosen.get(name) is not None for name in names)
    if not one_class or decided or chosen.get("weights") is None or chooses_weights(chosen):
        return None
    return read_pretraining_run(chosen["weights"])


def check_plannable(chosen: Mapping[str, Any]) -> None:
    """Refuse settings that leave nothing to plan."""
    if not (is_planned(chosen) or chooses_weights(chosen) or pretraining_run(chosen)):
        raise ConfigError(
            "a plan chooses the network: leave out --model and --method, and --weights or give "
            "--weights auto; or a run of vit pretrain, and images of one class each"
        )


def plan_training(
    settings: Mapping[str, Any], listing: Listing | None = None
) -> tuple[Config, Plan]:
    """Settings of a training: those in `settings`, and for all others what the plan says.

    Args:
        settings: By name, `data` among them; `check_plannable` does not refuse them.
        listing: The data, if they are listed already.

    Returns:
        The settings, with which `train` does what the plan says, and the plan.
    """
    chosen = settings if isinstance(settings, Settings) else Settings(call=settings)
    chosen = with_target_task(chosen)
    task = get_task(str(chosen.get("task", TrainingConfig.task)))
    by_tiles = TILE_SETTINGS if chosen.get("tiles") else {}
    usual = {**task.planned_settings, **by_tiles, **chosen.layers.get("task", {})}
    chosen = Settings(**({"task": {}} | chosen.layers | {"task": usual}))  # the lowest layer
    settled = known_origins(chosen, chosen.origins)
    values = {n: chosen[n] for n, origin in settled.items() if origin not in ("data", "weights")}
    pretrained = chooses_weights(values)
    if pretrained:
        check_chosen_weights(values)
    early = settings_with(before_plan=True)
    before = {name: value for name, value in values.items() if name in early}
    if before.get("accumulate") is None:  # of a batch that is still to be chosen
        before.pop("accumulate", None)
    if before.get("folds") is not None:
        before.setdefault("fold", 1)
    smallest = before.get("accumulate", 1)
    config = make_config({**before, "batch_size": before.get("batch_size", smallest)})
    if config.data.folds is not None:  # all have the plan of the first one
        config = with_settings(config, fold=1)
    check_channels(values.get("channels", 3), values.get("value_type"))
    accelerator = make_accelerator(config.run)
    listing = list_data(config) if listing is None else listing
    # networks are compared without the validation images of the training itself
    groups = group_finder(config, accelerator, None) if pretrained else None
    splits = open_data(config, listing, compare=pretrained, find_groups=groups)
    # what does not fit the task is refused before anything is measured
    get_task(config.training.task).check_data(config, splits, lambda _line: None)
    run = pretraining_run(values)
    network = {} if run is None else architecture_settings(*run)
    one_class = config.training.single_label and not splits.multilabel
    if pretrained:
        facts, choice, found = choose_backbone(
            chosen, values, config, splits, listing.spec, accelerator
        )
        named = None if choice is None else choice.weights.source
        layers = {
            origin: {n: named if n == "weights" else v for n, v in layer.items()}
            for origin, layer in chosen.layers.items()
        }
        compared = {}
        if splits.made and config.data.folds is None:  # no image of the comparison validates
            compared = {"val_share": config.data.val_share}
        layers["task"] = compared | layers["task"]
        if choice is None or pretraining_run(Settings(**layers)):
            config, plan = plan_training(Settings(**layers), listing)
            plan.backbones = found or {}
            return config, plan
        plan = plan_weights(facts, compared | values, choice, one_class=one_class)
        plan.choices |= {name: Choice(value, "as compared") for name, value in compared.items()}
        plan.backbones = found
    elif run is not None:
        facts = facts_of(config, splits, accelerator, {**network, **values})
        plan = plan_after_pretraining(facts, values, network, one_class=not splits.multilabel)
        theirs = {**dataclasses.asdict(run[0]), "num_classes": facts.classes}
        chosen = Settings(**{"weights": theirs, **chosen.layers})
    else:
        facts = facts_of(config, splits, accelerator, values)
        plan = make_plan(facts, values)
    plan.listing = listing
    config = make_config(Settings(**{**chosen.layers, "plan": plan.settings}))
    if facts.captions is not None:  # without classes, there is no head
        config = get_task(config.training.task).complete(config)
    return config, plan


def choose_backbone(
    chosen: Settings,
    values: Mapping[str, Any],
    config: Config,
    splits: Splits,
    spec: DatasetSpec,
    accelerator: Accelerator,
) -> tuple[Facts, WeightsChoice | None, dict[str, Any] | None]:
    """The facts, the weights for `--weights auto`, None for training from scratch, and what was
    measured of each, None where nothing is."""
    notify, limit = notifier(accelerator), download_limit(values["weights"]) or 0
    one_class = config.training.single_label and not splits.multilabel
    alone = {name: value for name, value in values.items() if name != "weights"}
    found, lines = on_main(accelerator, partial(find_backbones, config.data.data, splits.root))
    path = record_file(config, splits, alone, accelerator)
    record = on_main(accelerator, partial(read_record, path))
    if record is None:
        facts = facts_of(config, splits, accelerator, values)
        record = {"version": VERSION, "speeds": [facts.flops, facts.timed]}
    else:  # with the same speeds, the same choice
        flops, timed = record["speeds"]
        facts = dataclasses.replace(data_facts(config, splits, accelerator), flops=flops)
        facts = dataclasses.replace(facts, timed=tuple(TimedNetwork(*one) for one in timed))
    rules, scratch = Rules(facts, values, one_class), is_planned(alone)
    here = {Path(one.source).name for one in found}
    others = [one for one in LISTED if Path(one.source).name not in here]
    others = [one for one in others if (choice := rules.choose(one)) is not None and choice.fits]
    if limit:
        limit -= sum(int(1e6 * one.megabytes) for one in found if one.paper)
        fetched, more = on_main(accelerator, partial(fetch_backbones, others, limit))
        found, lines = [*found, *fetched], [*lines, *more]
    elif others:
        sizes = (f"{o.source} ({o.megabytes:.0f} MB, {license_name(o.license)})" for o in others)
        lines.append(f"not on this disk: {join_names(sizes, 3)}; --weights auto:1GB fetches some")
    measurable = one_class and not facts.channels and not config.data.tiles
    many = scratch and facts.labels >= MANY_LABELS and "image_size" not in values
    side = values.get("image_size") or image_side(facts.side, ladder_for(facts.side)[0])
    least = side if many else 0
    possible, left_out = [], {}
    for weights in found:
        if weights.image_size < least:
            left_out[weights.source] = f"training from scratch sees {least} px or more"
        elif not (measurable or weights.paper):  # it may know nothing of these images
            left_out[weights.source] = "only networks of the list are taken unmeasured"
        elif (choice := rules.choose(weights)) is None:
            left_out[weights.source] = "its patches do not divide the images"
        else:
            possible.append(choice)
    cheapest = sorted(possible, key=lambda one: one.seconds)[:1]
    choices = [one for one in possible if one.fits] or cheapest
    left_out |= {one.weights.source: TOO_SLOW for one in possible if one not in choices}
    lines += [f"{source} is left out: {why}" for source, why in left_out.items()]
    choices.sort(key=lambda one: (rules.methods.index(one.method), -one.weights.megabytes))
    for line in lines:
        notify(f"weights=auto: {line}")
    if not choices and not scratch:
        remedy = others[0].repository.fetch_command() if others else "a smaller image_size"
        raise ConfigError(
            "weights=auto: none of the weights that it chooses from is on this disk: give "
            f"--weights auto:1GB, or where there is a network run {remedy} and copy the folder here"
        )
    if not choices:
        return facts, None, None
    if not measurable:
        notify(
            "weights=auto: not measured, which takes one class an RGB image: the largest that fits"
        )
        return facts, choices[0], None
    spec = dataclasses.replace(spec, groups=splits.groups)
    names = image_groups(spec, [sample.path for sample in splits.train]) or []
    if names:  # one image of each: its copies in other folds would be right with any network
        own = {name or n: n for n, name in reversed([*enumerate(names)])}
        kept = tuple(splits.train[n] for n in sorted(own.values()))
        splits = dataclasses.replace(splits, train=kept)
    tournament = Tournament(
        *(record, path, choices, chosen, config, splits, accelerator),
        seconds=planned_seconds(facts),
        scratch=side if scratch else None,
    )
    choice = tournament.run()
    return facts, choice, tournament.summary()


def with_target_task(chosen: Settings) -> Settings:
    """`chosen` with the task that the columns `target` or an order ask for, unless it is chosen."""
    target, more = chosen.get("target"), ""
    if "task" in chosen:
        return chosen
    if chosen.get("taxonomy"):
        task, found = "taxonomy", "the classes have a tree"
    elif chosen.get("order"):
        task, found = "ordinal", "the classes have an order"
    elif target:
        data = {name: value for name, value in chosen.items() if name in vars(SourceConfig())}
        texts = text_targets(DatasetSpec.from_config(DataConfig(**data), labels=False))
        if texts and len(target) > 1:
            task, columns = "attributes", join_names(texts)
            others = join_names(name for name in target if name not in texts)
            found = f"classes in {columns}" + (f", numbers in {others}" if others else "")
        else:
            kind = ("paths" if all(texts.values()) else "classes") if texts else "numbers"
            task, other = TARGET_TASKS[kind]
            found, more = f"{join_names(target)} has {kind}", f"; --task {other} overrides it"
    else:
        return chosen
    notify_on_main(f"note: {found}: task={task}{more}")
    return Settings(**{"task": {"task": task}, **chosen.layers})


def check_chosen_weights(values: Mapping[str, Any]) -> None:
    """Refuse settings that leave `--weights auto` nothing to choose."""
    task = values.get("task", "classify")
    if "model" in values or task not in TASKS or get_task(task).writes_captions:
        raise ConfigError(
            "weights=auto chooses the network of a classifier: leave --model and other tasks out, "
            "or give the weights by name, such as timm/vit_small_patch16_224.augreg_in21k"
        )


def with_chosen_weights(
    config: Config, accelerator: Accelerator, begun: Path | None = None
) -> tuple[Config, Plan | None]:
    """`config` with what the plan chooses: weights for `--weights auto`, and how they are trained;
    also the plan.

    A run that is resumed has those that were chosen when it began. Settings return as they are
    unless they name `auto` or a run of `vit pretrain`.
    """
    needed = {"data": config.data.data, "weights": config.finetune.weights}
    chosen = Settings(**{"config": needed, **Settings.of(config).layers})
    if not chooses_weights(chosen) and (begun is not None or not pretraining_run(chosen)):
        return config, None
    if begun is None:
        config, plan = plan_training(chosen)
        for line in summary_lines(plan):
            notifier(accelerator)(line)
        return config, plan
    notifier(accelerator)("note: weights=auto is not used: the run keeps what it began with")
    return with_settings(config, weights=stored_config(begun).finetune.weights), None


def facts_of(
    config: Config, splits: Splits, accelerator: Accelerator, chosen: Mapping[str, Any]
) -> Facts:
    """What the plan follows from, the same on all processes."""
    with limit_gpu_memory(accelerator, headroom=PLAN_HEADROOM):
        facts = data_facts(config, splits, accelerator)
        return with_speeds(facts, chosen, cache(partial(measure_speed, config, accelerator)))


def data_facts(config: Config, splits: Splits, accelerator: Accelerator) -> Facts:
    """Those of `facts_of` that are not measured by training steps."""
    task = get_task(config.training.task)
    tiles = config.data.tiles
    side, grey, aspect = (
        (tiles[0], False, 1.0) if tiles else look_at_images(splits.train, config.data.axes)
    )
    factor = task.tiny_passes_factor if side <= TINY_SIDE else task.passes_factor
    device = accelerator.device.type
    channels, names = instrument_channels(splits.train, config)
    return Facts(
        images=len(splits.train),
        taught=len(splits.unlabelled),
        classes=len(splits.classes),
        side=side,
        grey=grey and not channels,
        channels=channels,
        channel_names=names,
        aspect=aspect,
        validation=len(splits.val),
        divided=splits.made,
        device=device,
        flops=0.0,
        memory=free_shared_memory(accelerator),
        device_memory=min_over_processes(accelerator, free_device_memory(accelerator.device) or 0),
        seconds=config.training.seconds,
        processes=accelerator.num_processes,
        sharded=is_sharded(accelerator),
        task_batch=task.planned_batch,
        tiles=PLANNED_TILES if tiles else 1,
        pass_cost=task.pass_cost * (PLANNED_TILES if tiles else 1),
        passes_factor=factor,
        captions=caption_stats(splits.train, config) if config.training.captions else None,
    )


def with_planned_cache(config: Config, splits: Splits, accelerator: Accelerator) -> Config:
    """`config` with the cache that the plan chooses, if the run of its weights had one."""
    before = run_of(str(config.finetune.weights))
    if before is None or before[1].data.cache == "none" or config.finetune.method == "probe":
        return config
    settings = {**vars(config.model), **vars(config.data), **vars(config.augment)}
    del settings["cache"]
    plan = Plan(data_facts(config, splits, accelerator), settings)
    decide_cache(plan)
    return with_settings(config, **plan.settings)


def free_shared_memory(accelerator: Accelerator) -> int:
    """Free bytes of shared memory, the least of all processes, which may differ over machines."""
    free = free_bytes(SHARED_MEMORY, memory=True) if SHARED_MEMORY.is_dir() else 0
    return min_over_processes(accelerator, free)


def with_speeds(facts: Facts, chosen: Mapping[str, Any], measure: Measure) -> Facts:
    """`facts` with the speeds of the networks that the plan chooses from."""
    if facts.device == "cuda":
        return with_gpu_speeds(facts, chosen, measure)
    if chooses_weights(chosen):
        return dataclasses.replace(facts, flops=measure(PROBE, facts.captions).flops)
    timed = time_networks(facts, ladder_for(facts.side)[:MEASURED], {}, measure)
    if facts.seconds is not None and facts.side <= TINY_SIDE:
        flops = timed[0].flops  # a second less of planning
    else:  # what decides how long the training takes is the same for all images
        flops = measure(PROBE, facts.captions).flops
    return dataclasses.replace(facts, flops=flops, timed=timed)


def with_gpu_speeds(facts: Facts, chosen: Mapping[str, Any], measure: Measure) -> Facts:
    """The same on GPUs: small batches and networks leave them waiting, and memory is limited."""
    batch = chosen.get("batch_size") or usual_batch(facts)
    views = max(round(facts.pass_cost), 1)  # of an image that are in memory together
    share = max(batch // facts.processes // (chosen.get("accumulate") or 1), 1)
    measure = partial(measure, batch=views * share)
    facts = dataclasses.replace(facts, flops=measure(PROBE, facts.captions).flops)
    if not facts.flops:
        raise RunError(
            "the GPU has no memory left for a training: end what else uses it, or use --device cpu"
        )
    if chooses_weights(chosen):
        return dataclasses.replace(facts, timed=(measure(WEIGHTS_PROBE, facts.captions),))
    known = dataclasses.replace(facts, seconds=planned_seconds(facts))
    timed = time_networks(known, ladder_for(facts.side), chosen, measure)
    if not timed[0].flops:
        raise RunError(
            "not one image of this network fits into the free memory of the GPU: choose a smaller "
            "--dim, --depth or --image-size, or end what else uses it"
        )
    return dataclasses.replace(
        facts,
        timed=tuple(one._replace(fits=one.fits and max(one.fits // views, 1)) for one in timed),
    )


def time_networks(
    facts: Facts, ladder: Sequence[Network], chosen: Mapping[str, Any], measure: Measure
) -> tuple[TimedNetwork, ...]:
    """The networks of `ladder`, up to the first one that is out of reach."""
    timed: list[TimedNetwork] = []
    for row in ladder:
        network = with_chosen(row, facts.side, chosen)
        cost = flops_with_captions(network, chosen, facts.captions)
        if timed and not timed[-1].flops:
            break
        if facts.seconds is not None and timed:
            # a GPU is the faster the larger the network is, but sees no more images in a second
            faster = cost / timed[-1].cost if facts.device == "cuda" else FASTER
            fast = faster * timed[-1].flops
            passes = affordable_passes(cost, facts.images, facts.seconds, fast) / facts.pass_cost
            if passes < needed_passes(row, facts.images) * facts.passes_factor:
                break
        timed.append(measure(network._replace(passes=0), facts.captions)._replace(cost=cost))
    return tuple(timed)


def caption_stats(samples: Sequence[Sample], config: Config) -> CaptionStats:
    """How many captions there are, and how long they are, in tokens learned from some of them."""
    captions = [caption for sample in samples for caption in sample.captions]
    some = captions[:: max(len(captions) // TOKENIZED, 1)]
    tokenizer = train_tokenizer(some)
    ids = CaptionIds([some], tokenizer, config.decoder.caption_tokens or DEFAULT_MAX_TOKENS)
    words = sum(len(caption.split()) for caption in captions)
    return CaptionStats(
        total=len(captions),
        tokens=ids.mean_tokens,
        longest=ids.longest_kept,
        vocab_size=tokenizer.size,
        most_vocab=default_vocab_size(words),
    )


def instrument_channels(samples: Sequence[Sample], config: Config) -> tuple[int, tuple[str, ...]]:
    """Channels of instruments that the network takes, and their names; 0 for RGB of 8 bits."""
    if config.data.tiles:
        return 0, ()
    with contextlib.suppress(BadImage):  # the run itself meets it
        stored = check_header(samples[0].path, config.data.axes)
        if stored is not None and takes_channels(config, [stored]):
            refuse_for_channels(config)  # before the plan measures for seconds
            order = config.data.channel_order
            numbers, names = choose_channels(order, stored.channels, stored.names)
            return len(numbers), names
    return 0, ()


def look_at_images(samples: Sequence[Sample], axes: str = "") -> tuple[int, bool, float]:
    """Of some images the median short side in pixels, whether none has colours, and the aspect.

    The aspect is the median of the long side by the short side.
    """
    some = samples[:: max(len(samples) // HEADERS, 1)][:HEADERS]
    sides, aspects, colours = [], [], False
    for number, sample in enumerate(some):
        with contextlib.suppress(BadImage):  # the run itself meets it, and says how to go on
            short, long = sorted(read_size(sample.path, axes))
            sides.append(short)
            aspects.append(long / short)
            if number % max(len(some) // DECODED, 1) == 0 and not colours:
                pixels = read_pixels(sample.path, lambda _width, _height: LOOKED_AT)
                colours = bool((pixels != pixels[..., :1]).any())
    if not sides:
        return 224, not colours, 1.0
    return int(median(sides)), not colours, median(aspects)


def decoder_parameters(config: DecoderConfig, encoder: ModelConfig, captions: CaptionStats) -> int:
    """Parameters of the decoder of `config`, completed from `captions`; nothing is allocated."""
    words = config.vocab_size, config.caption_tokens
    completed = dataclasses.replace(
        config,
        vocab_size=min(words[0] or captions.vocab_size, captions.vocab_size),
        caption_tokens=words[1] or max(captions.longest, 3),
    )
    with torch.device("meta"):
        decoder = assemble_decoder(completed, encoder)
    return sum(parameter.numel() for parameter in decoder.parameters())


def plan_lines(plan: Plan, config: Config) -> list[str]:
    """The plan for reading: the facts, a line a setting with its reason, and what it costs."""
    facts = plan.facts
    kind = "grey" if facts.grey else "colour"
    kind = plural(facts.channels, "channel") if facts.channels else kind
    kind += f" ({', '.join(facts.channel_names)})" if facts.channel_names else ""
    labels = [f"{facts.classes} classes"] if facts.classes else []
    if facts.captions is not None:
        labels.append(
            f"{facts.captions.total:,} captions of {facts.captions.tokens:.0f} tokens on average"
        )
    lines = [
        f"{facts.images:,} training and {facts.validation:,} validation images, "
        f"{', '.join([*labels, kind])}, short side {facts.side} px; {facts.device} trains at "
        f"{(plan.speed or facts.flops) / 1e9:.0f} GFLOP/s"
    ]
    task = plan.get("task", config.training.task)
    fixed = get_task(task).planned_settings
    rows = {name: Choice(value, "given") for name, value in plan.chosen.items() if name != "data"}
    for name in fixed.keys() & rows.keys():
        if rows[name].value == fixed[name]:
            rows[name] = Choice(fixed[name], f"for task={task}")
    if "epochs" in rows and plan.chosen.get("time") is not None:
        rows["epochs"] = Choice(plan.get("epochs"), "not used: time is the length")
    rows |= plan.choices
    typed = [(*as_typed_flag(name, value), why) for name, (value, why) in rows.items()]
    width = max((len(name) for name, *_ in typed), default=0)
    lines += table_lines(plan.backbones) if plan.backbones else []
    lines += [f"  {name:<{width}}  {value!s:<13}  {why}".rstrip() for name, value, why in typed]
    if "weights" in plan.settings:
        return [*lines, *weights_lines(plan)]
    network = dataclasses.replace(config.model, num_classes=facts.classes)
    cost = cost_of(network, batch_size=config.data.batch_size)
    of_network = (
        f"{cost.parameters / 1e6:.1f} M parameters, {cost.flops / 1e6:,.0f} MFLOPs an image, "
        f"{cost.memory.training / 2**30:.2f} GiB in training"
    )
    if facts.captions is not None:
        parameters = cost.parameters + decoder_parameters(config.decoder, network, facts.captions)
        of_network = (
            f"the encoder {of_network}; with the decoder {parameters / 1e6:.1f} M parameters, "
            f"{plan.flops / 1e6:,.0f} MFLOPs an image and caption"
        )
    steps = round(plan.passes * facts.images / config.data.batch_size)
    seconds = config.training.seconds
    length = f"{config.training.epochs} epochs" if seconds is None else format_duration(seconds)
    return [
        *lines,
        f"{plan_name(plan)}: {of_network}; {length}, about {steps:,} steps, "
        f"{counted_passes(plan.passes)} over the images",
        *notes_of(plan),
    ]


def summary_lines(plan: Plan) -> list[str]:
    """The plan in two lines, for the start of a training, below what was measured for it."""
    measured = table_lines(plan.backbones) if plan.backbones else []
    if "weights" in plan.settings:
        reason = plan.choices["weights"].reason
        chosen = f"weights=auto: {plan.settings['weights']} ({reason})"
        return [*measured, chosen, *weights_lines(plan)]
    what = f"planned {plan_name(plan)}, {plan.get('image_size')} px"
    if "method" in plan.settings:  # the network is that of weights
        what = plan.choices["method"].reason
    return [
        *measured,
        f"note: {what}, {length_of(plan)}; "
        "`vit plan` has the reasons, and any flag fixes its setting",
        *notes_of(plan),
    ]


def weights_lines(plan: Plan) -> list[str]:
    """What a plan with pretrained weights costs, and how to train it."""
    method = plan.get("method")
    length = "" if method == "probe" else f", {length_of(plan)}"
    return [
        f"note: planned method={method} at {plan.get('image_size')} px, "
        f"{plan.flops / 1e6:,.0f} MFLOPs an image{length}; any flag fixes its setting"
    ]


def length_of(plan: Plan) -> str:
    """`about 50 passes in 5m`; where the time has room for more, why no more are made."""
    time = plan.get("time")
    when = f" in {time}" if time else ""
    if (room := plan.choices.get("time")) is not None and time is None:
        when = f" ({room.reason}, which gain nothing)"
    return f"about {counted_passes(plan.passes)}{when}"


def notes_of(plan: Plan) -> list[str]:
    """What no rule decides: pretrained weights for photographs, and what of long images is seen."""
    facts, notes = plan.facts, []
    if facts.aspect >= LONG and plan.chosen.get("resize", "crop") == "crop":
        labelled = facts.captions is None and plan.get("task") not in PRETRAINING_TASKS
        whole = "--resize native shows all of it"
        if not labelled:
            whole = "--resize squash shows all of it, distorted"
        notes.append(
            f"note: images are typically {facts.aspect:.1f} times as long as wide: validation and "
            f"prediction see the middle {1 / facts.aspect:.0%} of one; {whole}; or cut images into "
            "squares first"
        )
    few = bool(plan.settings.get("probe_first")) and facts.labels < MANY_LABELS
    if few and facts.divided and "weights" in plan.chosen and plan.get("folds") is None:
        every = f"all {facts.labels + facts.validation:,} labels"
        notes.append(f"note: --folds 5 measures with {every}, and makes one network of the five")
    return [*notes, *from_scratch_note(plan)]


def from_scratch_note(plan: Plan) -> list[str]:
    """What is better than training photographs from scratch: the weights of `--weights auto`."""
    without = plan.facts.captions is not None or plan.get("task") in PRETRAINING_TASKS
    if plan.facts.side <= TINY_SIDE or without or "weights" in plan.chosen:
        return []
    if plan.backbones is not None:  # the answer of weights=auto
        return []
    return [
        "note: this trains from scratch; for most photographs pretrained weights are better: "
        "--weights auto measures on these images those that are on this disk, and --weights "
        "auto:500MB fetches some first"
    ]


def plan_name(plan: Plan) -> str:
    """The network of a plan in a few words."""
    stem = "a convolutional stem, " if plan.get("stem") == "conv" else ""
    decoder = ""
    if plan.facts.captions is not None:
        decoder = f" and {plan.get('decoder_depth')} of a decoder"
    return f"{stem}{plural(plan.get('depth'), 'block')} of {plan.get('dim')}{decoder}"

"""Features are what the head reads, made once for each content, and survive what kills a run."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save, save_file

from tests.training.children import complete
from tests.training.runs import SIZES
from vit.config import ModelConfig, RunConfig
from vit.config.setting_layers import make_config
from vit.data.dataset_types import Sample
from vit.data.image_io import read_image
from vit.data.preprocessing import Preprocessing
from vit.data.sources.builtin_datasets import digits_folder
from vit.data.sources.open_dataset import open_splits
from vit.errors import BadImage, DataError, RunError
from vit.model.build import build_classifier
from vit.model.vision_transformer import VisionTransformer
from vit.training.distributed import collectives
from vit.training.distributed.devices import make_accelerator
from vit.training.finetune import feature_extraction
from vit.training.finetune.feature_extraction import (
    Features,
    FeatureStore,
    extract,
    network_features,
    weights_digest,
)
from vit.training.finetune.linear_probe import fit_probe
from vit.weights.safetensors_io import write_tensors

pytestmark = pytest.mark.auto_precision


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(feature_extraction, "CPU_BATCH_SIZE", 4)


MODEL = ModelConfig(**SIZES, num_classes=3, drop_path=0.5)
PREPROCESSING = Preprocessing(image_size=(16, 16))


def build(config: ModelConfig = MODEL, seed: int = 0) -> VisionTransformer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = build_classifier(config)
        torch.nn.init.normal_(network.head.weight)
    return network


def samples_of(data: Path) -> list[Sample]:
    """Interleaved, so that the order of the classes is not that of the files."""
    splits = open_splits(str(data), val_share=0.2, seed=0)
    return sorted(splits.train, key=lambda sample: Path(sample.path).name)


class Watched:
    """Calls `extract`, counts the images that were prepared, keeps what was said."""

    def __init__(self, cache: Path, *, precision: str = "fp32", **given: Any) -> None:
        self.config = make_config(
            {"data": "x", "feature_cache": str(cache), "precision": precision, "workers": 2}
            | {"on_bad_image": given.pop("on_bad_image", "stop"), "device": "cpu"}
        )
        self.accelerator = make_accelerator(self.config.run)
        config = given.pop("config", MODEL)
        self.network = given.pop("network", None) or build(config)
        self.preprocessing = given.pop("preprocessing", PREPROCESSING)
        self.key = given.pop("key", weights_digest(self.network.state_dict(), config))
        self.made = 0
        self.lines: list[str] = []

    def extract(self, samples: list[Sample], stopped=lambda: False) -> Features | None:
        own = network_features(
            self.network, self.preprocessing, self.config, self.accelerator, self.key
        )

        def prepare(path: str) -> torch.Tensor:
            self.made += 1
            return own.prepare(path)

        counting = own._replace(prepare=prepare)
        return extract(samples, counting, self.config, self.accelerator, self.lines.append, stopped)

    def __call__(self, samples: list[Sample]) -> Features:
        self.made = 0
        self.lines.clear()
        features = self.extract(samples)
        assert features is not None
        return features


def chunks(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*.safetensors"))


POOLINGS = {*get_args(get_type_hints(ModelConfig)["pooling"])} - {"none"}  # which no head reads


@pytest.mark.parametrize("pooling", sorted(POOLINGS))
def test_the_head_reads_them(colour_data, tmp_path, pooling):
    samples = samples_of(colour_data)
    watched = Watched(tmp_path, config=dataclasses.replace(MODEL, pooling=pooling))
    watched.network.train()
    for name, parameter in watched.network.named_parameters():
        if "norm" in name:  # twice is not once
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    features = watched(samples)
    assert features.values.shape == (36, 32 if pooling == "class_token_mean" else 16)
    assert features.values.dtype == torch.float32
    assert features.labels.tolist() == [sample.label for sample in samples]
    images = torch.stack([PREPROCESSING(read_image(sample.path)) for sample in samples])
    network = watched.network.eval()
    with torch.no_grad():
        expected = network(PREPROCESSING.normalise(images))
        torch.testing.assert_close(network.head(features.values), expected, atol=1e-5, rtol=1e-5)
    assert watched.lines == ["features: 0 of 36 images from the cache, 36 made"]
    features.values.add_(1)  # an ordinary tensor


@pytest.mark.parametrize("pooling", ["class_token", "mean"])
def test_a_second_time_they_are_only_read(colour_data, tmp_path, monkeypatch, pooling):
    monkeypatch.setattr(feature_extraction, "CHUNK", 10)
    config = dataclasses.replace(MODEL, pooling=pooling)
    samples, watched = samples_of(colour_data), Watched(tmp_path, config=config)
    first = watched(samples)
    assert watched.made == 36
    assert watched.lines == ["features: 0 of 36 images from the cache, 36 made"]
    assert len(chunks(tmp_path)) == 4
    again = watched(samples[::-1])
    assert watched.made == 0
    assert watched.lines == ["features: 36 of 36 images from the cache, 0 made"]
    assert again.values.equal(first.values.flip(0))
    assert again.labels.equal(first.labels.flip(0))
    # another data set that shares some images
    assert watched(samples[:3]).values.equal(first.values[:3])
    assert watched.made == 0
    assert len(chunks(tmp_path)) == 4


def test_what_a_feature_depends_on_is_noticed(colour_data, tmp_path):
    samples = samples_of(colour_data)[:6]
    watched = Watched(tmp_path)
    first = watched(samples)
    others = [
        Watched(tmp_path, network=build(seed=1)),
        Watched(tmp_path, preprocessing=dataclasses.replace(PREPROCESSING, crop_share=0.5)),
        Watched(tmp_path, precision="bf16"),
        # the same weights, read in another way
        Watched(tmp_path, config=dataclasses.replace(MODEL, num_heads=4), network=watched.network),
    ]
    for other in others:
        other(samples)
        assert other.made == 6
    assert len({path.parent for path in chunks(tmp_path)}) == 5
    head = Watched(tmp_path, network=watched.network)
    torch.nn.init.zeros_(head.network.head.weight)
    more = dataclasses.replace(MODEL, num_classes=9, drop_path=0.0)
    head.key = weights_digest(head.network.state_dict(), more)
    assert head(samples).values.equal(first.values)
    assert head.made == 0


def test_a_changed_file_is_noticed_and_a_renamed_one_is_not_new(colour_data, tmp_path):
    data = shutil.copytree(colour_data, tmp_path / "data")
    watched = Watched(tmp_path / "cache")
    first = watched(samples_of(data))
    changed, renamed = data / "train/red/3.png", data / "train/blue/0.png"
    Image.new("RGB", (20, 18), "white").save(changed)
    renamed.rename(renamed.with_name("0 again.png"))
    samples = samples_of(data)
    second = watched(samples)
    assert watched.made == 1
    assert watched.lines == ["features: 35 of 36 images from the cache, 1 made"]
    place = [sample.path for sample in samples].index(str(changed))
    rows = {tuple(row) for row in first.values.tolist()}
    assert [tuple(row) in rows for row in second.values.tolist()].index(False) == place


def test_the_same_content_is_made_once(colour_data, tmp_path):
    samples = samples_of(colour_data)[:3]
    copy = shutil.copy(samples[0].path, tmp_path / "copy.png")
    twice = [*samples, Sample(str(copy), 2), samples[1]]
    watched = Watched(tmp_path / "cache")
    features = watched(twice)
    assert watched.made == 3
    assert watched.lines == ["features: 0 of 5 images from the cache, 3 made"]
    assert features.values[3].equal(features.values[0])
    assert features.values[4].equal(features.values[1])
    assert features.labels.tolist() == [sample.label for sample in twice]


def harmed(path: Path, harm: str) -> bytes:
    """Its content, in one of three ways."""
    content = path.read_bytes()
    if harm == "a changed bit":
        return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
    return content[:-10] if harm == "cut" else save({"keys": load_file(path)["keys"]})


@pytest.mark.parametrize("harm", ["a changed bit", "cut", "without values"])
def test_a_damaged_chunk_is_told_of_and_made_again(colour_data, tmp_path, monkeypatch, harm):
    monkeypatch.setattr(feature_extraction, "CHUNK", 10)
    samples, watched = samples_of(colour_data), Watched(tmp_path)
    first = watched(samples)
    victim = chunks(tmp_path)[1]
    size = len(load_file(victim)["keys"])
    victim.write_bytes(harmed(victim, harm))
    again = watched(samples)
    torch.testing.assert_close(again.values, first.values, atol=1e-5, rtol=1e-5)
    assert watched.made == size
    assert victim.name in watched.lines[0]
    assert watched.lines[0].endswith("its features are made again")
    assert not victim.exists()
    watched(samples)
    assert (watched.made, len(watched.lines)) == (0, 1)


def store_of(cache: Path, keys: list[bytes], notify=print) -> FeatureStore:
    """A store that has read what is in the cache."""
    store = FeatureStore(cache, {}, keys, notify)
    store.found = store.open()
    return store


def test_a_chunk_of_something_else_is_no_chunk(tmp_path):
    lines: list[str] = []
    path = store_of(tmp_path, []).folder / "0.safetensors"
    tensors = {"keys": torch.zeros(1, 32, dtype=torch.uint8), "values": torch.ones(1, 4).double()}
    write_tensors(path, tensors, {})
    assert store_of(tmp_path, [bytes(32)], lines.append).found == set()
    assert "it holds no features" in lines[0]


def test_an_image_that_cannot_be_read_stops_and_the_others_are_kept(
    data_with_a_bad_image, tmp_path
):
    samples, watched = samples_of(data_with_a_bad_image), Watched(tmp_path)
    with pytest.raises(BadImage, match=r"red/3\.png: damaged"):
        watched(samples)
    assert watched.lines == []
    watched = Watched(tmp_path, on_bad_image="skip")
    features = watched(samples)
    assert watched.made == 1  # it was tried again
    assert watched.lines == ["features: 35 of 36 images from the cache, 0 made"]
    assert [Path(path).name for path in features.failed] == ["3.png"]
    assert "damaged" in next(iter(features.failed.values()))
    good = [sample for sample in samples if sample.path not in features.failed]
    assert features.labels.tolist() == [sample.label for sample in good]
    assert features.values.equal(watched(good).values)


def test_what_is_no_image_at_all(bad_images, colour_data, tmp_path):
    good = samples_of(colour_data)[:2]
    bad_images = [path for path in bad_images if "pipe" not in path]  # of which no sample is made
    samples = [good[0], *(Sample(path, 0) for path in bad_images), good[1]]
    watched = Watched(tmp_path, on_bad_image="skip")
    features = watched(samples)
    assert [*features.failed] == bad_images
    assert len(features.values) == len(features.labels) == 2
    missing = next(path for path in bad_images if "missing" in path)
    assert "No such file" in features.failed[missing]
    with pytest.raises(BadImage):
        Watched(tmp_path)(samples)
    with pytest.raises(DataError, match="not one image"):
        watched(samples[1:-1])
    with pytest.raises(DataError, match="not one image"):
        watched([])


def test_a_file_that_changes_while_it_is_read_is_not_kept(colour_data, tmp_path, monkeypatch):
    sample = samples_of(shutil.copytree(colour_data, tmp_path / "data"))[0]

    def swapping(_self, path: str, **settings) -> Image.Image:
        Image.new("RGB", (20, 18), "white").save(path)
        return read_image(path, **settings)

    monkeypatch.setattr(Preprocessing, "read", swapping)
    with pytest.raises(BadImage, match="it changed while it was read"):
        Watched(tmp_path / "cache")([sample])
    assert chunks(tmp_path / "cache") == []


def test_a_killed_extraction_goes_on_after_its_last_chunk(colour_data, tmp_path, monkeypatch):
    monkeypatch.setattr(feature_extraction, "CHUNK", 10)
    samples, watched = samples_of(colour_data), Watched(tmp_path)
    forward = watched.network.features
    calls = []

    def dying(images: torch.Tensor) -> torch.Tensor:
        calls.append(len(images))
        if len(calls) == 5:  # of 3 a chunk
            raise KeyboardInterrupt
        return forward(images)

    monkeypatch.setattr(watched.network, "features", dying)
    with pytest.raises(KeyboardInterrupt):
        watched(samples)
    assert len(chunks(tmp_path)) == 1
    watched(samples)
    assert watched.made == 26
    assert max(calls) == 4


def test_a_signal_keeps_all_that_was_made(colour_data, tmp_path, monkeypatch):
    samples, watched = samples_of(colour_data), Watched(tmp_path)
    answers = iter([False, False, False, True])  # the first one is asked after hashing
    assert watched.extract(samples, stopped=lambda: next(answers)) is None
    assert watched.lines == []
    kept = sum(len(load_file(path)["keys"]) for path in chunks(tmp_path))
    assert kept == 12
    watched(samples)
    assert watched.made == 36 - kept
    monkeypatch.setattr(feature_extraction, "HASHED", 10)
    assert watched.extract(samples, stopped=lambda: True) is None


def test_two_runs_may_write_at_once(tmp_path):
    keys = [bytes([number] * 32) for number in range(4)]
    first, second = (store_of(tmp_path, keys) for _ in range(2))
    first.add(keys[:3], [torch.arange(3.0).view(3, 1)])
    second.add(keys[1:], [torch.arange(1, 3.0).view(2, 1), torch.full((1, 1), 3.0)])
    assert len(chunks(tmp_path)) == 2
    wanted = [keys[3], keys[0], keys[2]]
    read = store_of(tmp_path, wanted)
    assert read.found == {*wanted}
    assert read.vectors(keys[2:]).tolist() == [[2.0], [3.0]]


def test_a_cache_that_cannot_be_written_is_an_error(colour_data, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="could not be written"):
        Watched(tmp_path / "file")(samples_of(colour_data)[:1])


def test_features_that_are_not_finite_are_an_error(colour_data, tmp_path):
    watched = Watched(tmp_path)
    torch.nn.init.constant_(watched.network.norm.weight, float("inf"))
    with pytest.raises(RunError, match="not finite in fp32"):
        watched(samples_of(colour_data)[:2])
    assert chunks(tmp_path) == []


def test_double_precision(colour_data, tmp_path):
    samples = samples_of(colour_data)[:5]
    double = Watched(tmp_path, network=build().double(), precision="fp64")(samples).values
    assert double.dtype == torch.float32
    torch.testing.assert_close(double, Watched(tmp_path)(samples).values, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_digits_are_told_apart_by_an_untrained_network(tmp_path):
    splits = open_splits(str(digits_folder(tmp_path)), val_share=0.2, seed=0)
    watched = Watched(tmp_path)
    train, val = (watched([*samples[::3]]) for samples in (splits.train, splits.val))
    head = fit_probe(train.values, train.labels, 10, seed=0)
    assert head.correct(val.values, val.labels) / len(val.labels) > 0.5


def extract_in_parts(data: Path, out: Path, on_bad_image: str) -> int:
    """In each of several processes: extract twice, and leave what came of it."""
    feature_extraction.CHUNK, feature_extraction.CPU_BATCH_SIZE = 10, 4
    rank, samples = os.environ["RANK"], samples_of(data)
    watched = Watched(out / "cache", on_bad_image=on_bad_image)
    made, lines = [], []
    try:
        for _ in range(2):
            found = watched(samples)
            made.append(watched.made)
            lines += watched.lines
    except BadImage as bad:
        (out / f"{rank}.txt").write_text(str(bad))
        return 0
    tensors = {"values": found.values, "labels": found.labels, "made": torch.tensor(made)}
    save_file(tensors, out / f"{rank}.safetensors")
    (out / f"{rank}.txt").write_text("\n".join([*found.failed, *lines]))
    return 0


def test_two_processes_share_the_work(data_with_a_bad_image, tmp_path):
    bad = str(data_with_a_bad_image / "train/red/3.png")
    arguments = (data_with_a_bad_image, tmp_path, "skip")
    complete(extract_in_parts, *arguments, log=tmp_path / "log", processes=2)
    alone = Watched(tmp_path / "alone", on_bad_image="skip")(samples_of(data_with_a_bad_image))
    found = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    for part in found:
        assert part["values"].equal(found[0]["values"])
        torch.testing.assert_close(part["values"], alone.values, atol=1e-5, rtol=1e-5)
        assert part["labels"].equal(alone.labels)
        assert part["made"][0] == 18  # half of them
    assert sum(part["made"][1] for part in found) == 1  # the bad one, again
    assert len(chunks(tmp_path / "cache")) == 4
    said = [(tmp_path / f"{rank}.txt").read_text().splitlines() for rank in range(2)]
    assert said[1] == [bad]  # the main process speaks
    assert said[0][0] == bad
    assert said[0][2].startswith("features: 35 of 36 images from the cache, 0 made")


def test_both_processes_stop_at_a_bad_image(data_with_a_bad_image, tmp_path):
    arguments = (data_with_a_bad_image, tmp_path, "stop")
    complete(extract_in_parts, *arguments, log=tmp_path / "log", processes=2)
    said = {(tmp_path / f"{rank}.txt").read_text() for rank in range(2)}
    assert len(said) == 1
    assert "red/3.png: damaged" in said.pop()


@pytest.mark.parametrize("sent", [1, 40, 2**24])
def test_large_tensors_are_sent_in_parts(tmp_path, sent):
    complete(send, tmp_path, sent, log=tmp_path / "log", processes=2)
    found = [load_file(tmp_path / f"{rank}.safetensors")["values"] for rank in range(2)]
    assert all(values.equal(torch.arange(70.0).view(10, 7)) for values in found)


def send(out: Path, sent: int) -> None:
    """In each of several processes: take what the main one has."""
    rank = os.environ["RANK"]
    accelerator = make_accelerator(RunConfig(device="cpu"))
    collectives.BROADCAST_NUMBERS = sent
    make = {"0": lambda: torch.arange(70.0).view(10, 7)}
    values = collectives.broadcast_tensor(accelerator, make.get(rank, lambda: torch.zeros(1)))
    save_file({"values": values}, out / f"{rank}.safetensors")

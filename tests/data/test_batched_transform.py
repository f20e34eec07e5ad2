"""Batches augmented at once equal what the same random choices give one by one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as tv

from vit.config import AugmentConfig, Config, DataConfig
from vit.data.auto_augment import COLOURS, ChannelJitter, adjust_colours
from vit.data.batched_transform import (
    CROP_NUMBERS,
    NUMBERS,
    ORDERS,
    BatchedTransform,
    View,
    axis_matrix,
    uniform_numbers,
)
from vit.data.dataloader import TrainingLoader
from vit.data.dataset import ConstantTransform
from vit.data.dataset_types import Sample
from vit.data.device_cache import (
    DeviceCache,
    DeviceDataset,
    check_device_memory,
    free_device_memory,
    similar_chunks,
)
from vit.data.image_cache import open_cache
from vit.data.instrument_images import ChannelImage, ChannelSpec
from vit.data.multi_view import MultiViewTransform, ViewLayout
from vit.data.preprocessing import Preprocessing
from vit.data.sampler import MicroBatchSampler, SampleKey
from vit.data.transforms import TrainingTransform, random_crop_box, translated
from vit.errors import ConfigError, DataError

CPU = torch.device("cpu")
WHOLE = {"min_crop": 1.0, "hflip": 0.0}


def photograph(height: int, width: int, seed: int) -> np.ndarray:
    """Smooth colours with some noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return np.clip(smooth + rng.integers(-9, 10, smooth.shape), 0, 255).astype(np.uint8)


IMAGES = [photograph(h, w, n) for n, (h, w) in enumerate([(40, 40), (33, 70), (90, 31), (24, 25)])]


def padded(images: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels with noise beyond each image, and the sizes."""
    sizes = torch.tensor([image.shape[:2] for image in images])
    height, width = sizes.amax(0).tolist()
    pixels = torch.randint(0, 256, (len(images), height, width, 3), dtype=torch.uint8)
    for place, image in zip(pixels, images, strict=True):
        place[: image.shape[0], : image.shape[1]] = torch.from_numpy(image)
    return pixels, sizes


def batched(config: AugmentConfig, images=IMAGES, **preprocessing) -> torch.Tensor:
    """The first view of `images`, (images, 3, side, side)."""
    chosen = {"image_size": (32, 32), "crop_share": 1.0, "interpolation": "bilinear"}
    single = TrainingTransform(config, Preprocessing(**{**chosen, **preprocessing}))
    transform = BatchedTransform(single, seed=5)
    counters = torch.arange(len(images))[:, None]
    return transform(*padded(images), transform.seeds(counters))


def singly(config: AugmentConfig, **preprocessing) -> torch.Tensor:
    chosen = {"image_size": (32, 32), "crop_share": 1.0, "interpolation": "bilinear"}
    transform = TrainingTransform(config, Preprocessing(**{**chosen, **preprocessing}))
    return torch.stack([transform(Image.fromarray(image)) for image in IMAGES])


def most_different(one: torch.Tensor, other: torch.Tensor) -> int:
    return int((one.int() - other.int()).abs().max())


@pytest.mark.parametrize("resize", ["crop", "squash"])
@pytest.mark.parametrize("share", [1.0, 0.8])
@pytest.mark.parametrize("filters", ["bilinear", "bicubic"])
@pytest.mark.parametrize("flips", [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
def test_whole_images_equal_those_of_pillow(resize, share, filters, flips):
    config = AugmentConfig(min_crop=1.0, hflip=flips[0], vflip=flips[1])
    settings = {"resize": resize, "crop_share": share, "interpolation": filters}
    ours = batched(config, **settings)
    assert ours.shape == (4, 3, 32, 32)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert most_different(ours, singly(config, **settings)) <= 1


def test_random_crops_equal_those_of_pillow_at_the_same_boxes():
    preprocessing = Preprocessing(image_size=(32, 24), crop_share=1.0, interpolation="bilinear")
    config = AugmentConfig(min_crop=0.2, hflip=0.0)
    view = View(TrainingTransform(config, preprocessing))
    pixels, sizes = padded(IMAGES)
    numbers = uniform_numbers(torch.arange(4) * 977)
    boxes = view.boxes(sizes.float(), numbers[:, :CROP_NUMBERS])
    ours = view(pixels.float(), sizes, numbers)
    for image, made, *box in zip(IMAGES, ours, *boxes, strict=True):
        left, top, width, height = map(float, box)
        box = (left, top, min(left + width, image.shape[1]), min(top + height, image.shape[0]))
        whole = Image.fromarray(image)
        expected = whole.resize((24, 32), Image.Resampling.BILINEAR, box=box)
        assert most_different(made, torch.from_numpy(np.array(expected))) <= 1


def test_boxes_have_the_areas_and_shapes_that_are_asked_for():
    config = AugmentConfig(min_crop=0.3, crop_ratio=1.5)
    view = View(TrainingTransform(config, Preprocessing(image_size=(32, 32))))
    numbers = uniform_numbers(torch.randint(2**62, (20_000,)))
    boxes = view.boxes(torch.tensor([[60.0, 80.0]]).repeat(20_000, 1), numbers[:, :CROP_NUMBERS])
    area, ratio = boxes.width * boxes.height / 4800, boxes.width / boxes.height
    assert 0.3 <= area.min() < 0.31
    assert area.max() <= 1.0001
    torch.manual_seed(0)
    singly = torch.tensor([random_crop_box(80, 60, 0.3, 1.5) for _ in range(4000)])
    widths, heights = singly[:, 2] - singly[:, 0], singly[:, 3] - singly[:, 1]
    assert area.mean() == pytest.approx(float((widths * heights).mean()) / 4800, abs=0.01)
    assert ratio.log().mean() == pytest.approx(float((widths / heights).log().mean()), abs=0.012)
    assert boxes.left.mean() == pytest.approx(float(singly[:, 0].mean()), abs=0.4)
    assert ratio.min() >= 1 / 1.5001
    assert ratio.max() <= 1.5001
    assert min(boxes.left.min(), boxes.top.min()) >= 0
    assert (boxes.left + boxes.width).max() <= 80.001
    assert (boxes.top + boxes.height).max() <= 60.001
    # no crop of at least 30 % of a strip has an allowed shape: the largest one, centred
    strips = torch.tensor([[10.0, 200.0], [200.0, 10.0]])
    left, top, width, height = view.boxes(strips, numbers[:2, :CROP_NUMBERS])
    assert torch.stack([left, top, width, height], 1).tolist() == [
        [92.5, 0.0, 15.0, 10.0],
        [0.0, 92.5, 10.0, 15.0],
    ]


def test_local_views_are_small_crops_below_the_global_ones():
    layout = ViewLayout(32, 16, 2, 3)
    config = AugmentConfig(min_crop=0.5)
    preprocessing = Preprocessing(image_size=(32, 32))
    transform = BatchedTransform(
        MultiViewTransform(config, preprocessing, layout, (0.05, 0.2)), seed=1
    )
    pixels, sizes = padded(IMAGES)
    seeds = transform.seeds(torch.arange(4)[:, None])
    made = transform(pixels, sizes, seeds)
    assert made.shape == (4, 3, *layout.image_size)
    large, small = layout.split(made)
    assert (large.shape, small.shape) == ((8, 3, 32, 32), (12, 3, 16, 16))
    assert len({tuple(view.flatten().tolist()) for view in small}) == 12
    (_, local), numbers = (view for view, _ in transform.kinds), uniform_numbers(seeds[:, 2])
    boxes = local.boxes(sizes.float(), numbers[:, :CROP_NUMBERS])
    assert (boxes.width * boxes.height / sizes.prod(1)).max() <= 0.2001


def test_shifts_are_those_of_whole_images():
    config = AugmentConfig(**WHOLE, translate=0.3)
    still, moved = batched(AugmentConfig(**WHOLE)), batched(config)
    preprocessing = Preprocessing(image_size=(32, 32))
    transform = BatchedTransform(TrainingTransform(config, preprocessing), seed=5)
    numbers = uniform_numbers(transform.seeds(torch.arange(4)[:, None])[:, 0])
    shifts = ((2 * numbers[:, CROP_NUMBERS + 2 : CROP_NUMBERS + 4] - 1) * 0.3 * 32).round().int()
    assert shifts.abs().min(0).values.max() > 0
    for before, after, (down, right) in zip(still, moved, shifts.tolist(), strict=True):
        pixels = before.permute(1, 2, 0).numpy()
        expected = translated(pixels, right, down, preprocessing.mean_colour)
        assert most_different(after, torch.from_numpy(expected).permute(2, 0, 1)) <= 1


@pytest.mark.parametrize("order", range(len(ORDERS)))
def test_colours_equal_those_of_single_images(order):
    config = AugmentConfig(**WHOLE, color_jitter=0.6)
    preprocessing = Preprocessing(image_size=(32, 32), crop_share=1.0, interpolation="bilinear")
    view = View(TrainingTransform(config, preprocessing))
    drawn = torch.tensor([[0.2, 0.9, 0.05], [0.95, 0.1, 0.8]])
    images = torch.from_numpy(np.stack([photograph(32, 32, n) for n in range(2)]))
    chosen = torch.full((2,), (order + 0.5) / len(ORDERS))
    made = view.adjusted(images.float(), torch.zeros(2), chosen, drawn).round()
    for image, factors, ours in zip(images, 0.4 + 1.2 * drawn, made, strict=True):
        adjustments = [(COLOURS[n], float(factors[n])) for n in ORDERS[order]]
        expected = adjust_colours(Image.fromarray(image.numpy()), adjustments)
        assert most_different(ours, torch.from_numpy(np.array(expected))) <= 2


def test_three_augment_makes_a_third_each_grey_solarised_and_blurred():
    image = photograph(32, 32, 3)
    config = AugmentConfig(**WHOLE, auto_augment="three", color_jitter=1e-6)
    made = batched(config, [image] * 900).float()
    still = batched(AugmentConfig(**WHOLE), [image])[0].float()
    grey = (made.amax(1) - made.amin(1)).amax((1, 2)) <= 1
    solarised = ((made - torch.minimum(still, 255 - still)).abs() <= 1).flatten(1).all(1)
    blurred = ~grey & ~solarised
    assert [int(kind.sum()) for kind in (grey, solarised)] == [
        pytest.approx(300, abs=45),
        pytest.approx(300, abs=45),
    ]

    def edges(images: torch.Tensor) -> torch.Tensor:
        return images.diff(dim=-1).abs().mean((-3, -2, -1))

    assert (edges(made[blurred]) <= edges(still) + 0.3).all()
    assert edges(made[blurred]).min() < 0.7 * edges(still)


@pytest.mark.parametrize("sigma", [0.5, 1.3, 2.0])
def test_blur_equals_that_of_torchvision_away_from_the_edges(sigma):
    image = torch.from_numpy(photograph(32, 32, 0)).permute(2, 0, 1).float()
    none, whole, size = torch.zeros(1), torch.full((1,), 32.0), torch.full((1,), 32)
    matrix, _ = axis_matrix(
        none, whole, 32, size, 32, "bilinear",
        flip=None, shift=None, sigma=torch.tensor([sigma]),
    )  # fmt: skip
    expected = tv.gaussian_blur(image, [17, 17], [sigma, sigma])
    made = matrix[0] @ image @ matrix[0].T
    torch.testing.assert_close(made[:, 9:-9, 9:-9], expected[:, 9:-9, 9:-9], rtol=0, atol=0.02)


def test_random_numbers_are_those_of_splitmix64():
    first = uniform_numbers(torch.zeros(1, dtype=torch.int64))[0, :3]
    outputs = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert first.tolist() == [(number >> 40) / 2**24 for number in outputs]


def test_views_of_an_image_have_random_numbers_of_their_own():
    layout = ViewLayout(16, 8, 2, 2)
    transform = MultiViewTransform(
        AugmentConfig(), Preprocessing(image_size=(16, 16)), layout, (0.1, 0.3)
    )
    counters = torch.cartesian_prod(torch.arange(3), torch.arange(3), torch.arange(2))
    seeds = BatchedTransform(transform, 0).seeds(counters)
    other = BatchedTransform(transform, 1).seeds(counters)
    assert len({*seeds.flatten().tolist(), *other.flatten().tolist()}) == 2 * 18 * 4
    numbers = uniform_numbers(seeds.flatten())
    assert numbers.shape == (72, NUMBERS)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert numbers.mean() == pytest.approx(0.5, abs=0.03)
    assert torch.corrcoef(numbers.T).fill_diagonal_(0).abs().max() < 0.6


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"rotate": 10.0}, "rotate=10.0"),
        ({"erase": 0.5}, "erase=0.5"),
        ({"auto_augment": "randaugment"}, "auto_augment=randaugment"),
        ({"random_crop": "simple"}, "random_crop=simple"),
        ({"auto_augment": "three", "translate": 0.1, "vflip": 0.5}, None),
    ],
)
def test_settings_without_a_batched_form_are_named(settings, name):
    assert AugmentConfig(**settings).unbatched == name
    if name is not None:
        with pytest.raises(ConfigError, match=f"cache=device: .* not {name}; use --cache ram"):
            Config(
                data=DataConfig(data="photos", cache="device"), augment=AugmentConfig(**settings)
            )


# --- channels of instruments --------------------------------------------------------------------


def spec_of(kind: str) -> ChannelSpec:
    """Four channels with ranges of their own; the floats differ by less than 1e-5 of their size."""
    low, width = (900.0, 0.05) if kind == "float32" else (20.0, 180.0)
    low += 1000 * (kind == "uint16")
    return ChannelSpec(
        value_type=kind, count=4, order=(0, 1, 2, 3), low=(low,) * 4,
        high=(low + width, low + width / 2, low + width, low + width),
        mean=(0.5, 0.4, 0.3, 0.2), std=(0.2,) * 4,
    )  # fmt: skip


def channel_images(kind: str) -> list[np.ndarray]:
    spec, images = spec_of(kind), []
    for image in IMAGES:
        shares = np.concatenate([image, 255 - image[..., :1]], 2) / 255
        values = np.array(spec.low) + shares * (np.array(spec.high) - spec.low)
        images.append((values if kind == "float32" else values.round()).astype(kind))
    return images


def views_of(kind: str, config: AugmentConfig, images=None, **preprocessing):
    """The views of `images` by a BatchedTransform, and by a TrainingTransform one by one."""
    chosen = {"image_size": (32, 32), "crop_share": 1.0, "interpolation": "bilinear"}
    size = Preprocessing(**{**chosen, **preprocessing}, channels=spec_of(kind))
    single = TrainingTransform(config, size)
    images = channel_images(kind) if images is None else images
    transform = BatchedTransform(single, seed=5)
    sizes = torch.tensor([image.shape[:2] for image in images])
    pixels = np.ones((len(images), *sizes.amax(0).tolist(), 4), kind)
    for place, image in zip(pixels, images, strict=True):
        place[: image.shape[0], : image.shape[1]] = image
    seeds = transform.seeds(torch.arange(len(images))[:, None])
    made = transform(torch.from_numpy(pixels), sizes, seeds)
    return made, torch.stack([single(ChannelImage(image)) for image in images])


@pytest.mark.parametrize(("kind", "off"), [("uint8", 1), ("uint16", 1), ("float32", 2.5e-4)])
@pytest.mark.parametrize("settings", [{"resize": "squash"}, {"interpolation": "bicubic"}])
def test_channels_equal_those_of_single_images(kind, off, settings):
    made, expected = views_of(kind, AugmentConfig(min_crop=1.0, hflip=1.0), **settings)
    assert made.dtype == expected.dtype == getattr(torch, kind)
    assert made.shape == (4, 4, 32, 32)
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert float((made.double() - expected.double()).abs().max()) <= off
    assert float(made.double().std()) > 20 * off


def test_a_shift_uncovers_the_mean_of_each_channel():
    made, _ = views_of("float32", AugmentConfig(**WHOLE, translate=1.0))
    corners = made[..., [0, 0, -1, -1], [0, -1, 0, -1]]
    fill = torch.tensor(spec_of("float32").fill)[:, None]
    assert ((corners - fill).abs() < 1e-4).all(1).any(1).all()


@pytest.mark.slow
def test_channel_jitter_has_the_distribution_of_single_images():
    strength, spec, count = 0.6, spec_of("float32"), 1000
    image = channel_images("float32")[0][:16, :16]
    config = AugmentConfig(**WHOLE, color_jitter=strength)
    made, _ = views_of("float32", config, [image] * count, image_size=(16, 16))
    torch.manual_seed(0)
    jitter = ChannelJitter(strength, spec)
    single = np.stack([jitter(ChannelImage(image)).to_array() for _ in range(count)])

    def statistics(values: torch.Tensor) -> list[torch.Tensor]:
        """Level, contrast, noise and whether it is left out, of each channel and view."""
        low, high = (torch.tensor(end, dtype=torch.float64) for end in (spec.low, spec.high))
        shares = (values.double() - low) / (high - low)
        original = (torch.from_numpy(image).double() - low) / (high - low)
        original = original - original.mean((0, 1))
        contrast = (shares * original).mean((1, 2)) / (original**2).mean((0, 1))
        level = shares.mean((1, 2))
        rest = shares - level[:, None, None] - contrast[:, None, None] * original
        return [level, contrast, rest.std((1, 2)), (contrast.abs() < 0.02).double()]

    ours = statistics(made.permute(0, 2, 3, 1))
    theirs = statistics(torch.from_numpy(single))
    shares = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        distance = one.quantile(shares, 0) - other.quantile(shares, 0)
        assert float((distance.abs() / other.std(0)).max()) < 0.25
    for one in (ours, theirs):
        assert one[3].mean(0).tolist() == pytest.approx([strength / 3 / 4] * 4, abs=0.03)
        assert one[3].sum(1).max() == 1
        assert abs(float(torch.corrcoef(one[0].T)[0, 1])) < 0.15  # channels vary by themselves


def test_a_device_has_the_channels_of_files(tmp_path, monkeypatch):
    paths = [str(tmp_path / f"{number}.npy") for number in range(4)]
    for path, image in zip(paths, channel_images("uint16"), strict=True):
        np.save(path, image)
    spec, folder = spec_of("uint16"), tmp_path / "cache"
    cache = DeviceCache(open_cache(paths, side=99, kind="disk", folder=folder, channels=spec), CPU)
    pixels, sizes = cache.gather(torch.arange(4), torch.arange(4))
    for image, (height, width), path in zip(pixels, sizes.tolist(), paths, strict=True):
        assert np.array_equal(image[:height, :width].numpy(), np.load(path))
    size = Preprocessing(image_size=(16, 16), channels=spec)
    transform = TrainingTransform(AugmentConfig(color_jitter=0.3), size)
    samples = [Sample(path, 0) for path in paths]
    dataset = DeviceDataset(cache, samples, ConstantTransform(transform), seed=3)
    keys = [SampleKey(0, sample, sample, 0, 0) for sample in range(4)]
    together = dataset.load_batch(keys, None).images
    assert together.dtype == torch.uint16
    for number, key in enumerate(keys):
        assert torch.equal(dataset.load_batch([key], None).images[0], together[number])
    monkeypatch.setattr("vit.data.device_cache.CHUNK_BYTES", 1)
    assert torch.equal(dataset.load_batch(keys, None).images, together)


# --- images in the memory of a device -------------------------------------------------------------


AUGMENT = AugmentConfig(min_crop=0.3, auto_augment="three")
TRANSFORM = ConstantTransform(TrainingTransform(AUGMENT, Preprocessing(image_size=(8, 8))))


@pytest.fixture
def cache(samples, tmp_path):
    paths = [sample.path for sample in samples]
    return open_cache(paths, side=12, kind="disk", folder=tmp_path / "cache")


def epoch(samples, cache, *, start=0, **settings):
    schedule = MicroBatchSampler(count=len(samples), seed=3, batch_size=4)
    device = DeviceCache(cache, CPU)
    loader = TrainingLoader(samples, TRANSFORM, schedule, epochs=3, cache=device, **settings)
    return [batch for number in range(3) for batch in loader.epoch(number, start)]


def test_batches_of_a_device_hold_the_cached_images(samples, cache):
    device = DeviceCache(cache, CPU)
    numbers = torch.tensor([3, 0, 9])
    pixels, sizes = device.gather(numbers, numbers)
    for number, image, (height, width) in zip(numbers, pixels, sizes.tolist(), strict=True):
        expected = torch.from_numpy(cache.pixels(int(number)))
        assert torch.equal(image[:height, :width], expected)


def test_an_image_is_the_same_in_any_batch_and_differs_from_pass_to_pass(samples, cache):
    dataset = DeviceDataset(DeviceCache(cache, CPU), samples, TRANSFORM, seed=3)
    keys = [SampleKey(0, sample, sample, 0, 0) for sample in range(6)]
    together = dataset.load_batch(keys, None)
    assert together.images.shape == (6, 3, 8, 8)
    assert together.labels.tolist() == [samples[n].label for n in range(6)]
    for number in range(6):
        alone = dataset.load_batch([keys[number]], None)
        assert torch.equal(alone.images[0], together.images[number])
    for other in (keys[0]._replace(pass_index=1), keys[0]._replace(repetition=1)):
        assert not torch.equal(dataset.load_batch([other], None).images[0], together.images[0])


def test_chunks_do_not_change_a_batch(samples, tmp_path, monkeypatch):
    for number, size in ((3, (12, 90)), (8, (90, 12)), (11, (70, 13))):
        Image.fromarray(photograph(*size, number)).save(samples[number].path)
    paths = [sample.path for sample in samples]
    images = open_cache(paths, side=12, kind="disk", folder=tmp_path / "cache")
    dataset = DeviceDataset(DeviceCache(images, CPU), samples, TRANSFORM, seed=3)
    gathered, gather = [], dataset.device_cache.gather

    def counted(samples, chosen):
        gathered.append(samples.tolist())
        return gather(samples, chosen)

    monkeypatch.setattr(dataset.device_cache, "gather", counted)
    keys = [SampleKey(0, sample, sample, 0, 0) for sample in range(20)]
    whole = dataset.load_batch(keys, None).images
    monkeypatch.setattr("vit.data.device_cache.CHUNK_BYTES", 6 * 4 * 3 * 12 * 12)
    assert torch.equal(dataset.load_batch(keys, None).images, whole)
    parts = gathered[1:]
    assert sorted(number for part in parts for number in part) == [*range(20)]
    assert len(parts) > 4
    for long in (3, 8, 11):
        assert [long] in parts


def test_long_images_are_chunked_apart():
    sizes = torch.tensor([[40, 40], [40, 900], [900, 40], [40, 44], [41, 40], [40, 880]])
    chunks = similar_chunks(sizes, lambda height, width: height * width * 2**10)
    assert sorted(sorted(chunk.tolist()) for chunk in chunks) == [[0, 3, 4], [1], [2], [5]]
    whole = similar_chunks(sizes, lambda height, width: height * width)
    assert [chunk.tolist() for chunk in whole] == [[0, 1, 2, 3, 4, 5]]


def test_an_epoch_of_a_device_can_start_at_any_step(samples, cache):
    whole, rest = epoch(samples, cache), epoch(samples, cache, start=1)
    assert (len(whole), len(rest)) == (15, 12)
    whole = [batch for number, batch in enumerate(whole) if number % 5]
    for one, other in zip(whole, rest, strict=True):
        for name in ("images", "labels", "indices", "positions"):
            assert torch.equal(getattr(one, name), getattr(other, name))


def test_unreadable_images_of_a_device_are_listed(samples, tmp_path):
    broken = Path(samples[2].path)
    broken.write_bytes(b"no image")
    paths = [sample.path for sample in samples]
    cache = open_cache(paths, side=12, kind="disk", folder=tmp_path / "cache")
    failed = [bad.path for batch in epoch(samples, cache) for bad in batch.failed]
    assert failed
    assert set(failed) == {str(broken)}


def test_images_that_do_not_fit_into_a_gpu_are_refused(cache):
    needed = sum(cache.pixels(number).nbytes for number in range(20))
    check_device_memory(cache, 2 * needed)
    with pytest.raises(DataError, match=r"half of the free memory of the GPU.*--cache ram"):
        check_device_memory(cache, 2 * needed - 2)


def test_memory_that_torch_keeps_for_itself_is_free(monkeypatch):
    sizes = {"memory_reserved": 50, "memory_allocated": 20, "mem_get_info": (100, 1000)}
    for name, size in sizes.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda _device, size=size: size)
    assert free_device_memory(torch.device("cuda")) == 130
    assert free_device_memory(CPU) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "uint16", "float32"])
def test_a_gpu_augments_as_a_cpu(gpu_wait_is_an_error, kind):
    policy = {"color_jitter": 0.3} if kind else {"auto_augment": "three"}
    config = AugmentConfig(min_crop=0.35, translate=0.1, **policy)
    layout = ViewLayout(32, 16, 2, 2)
    spec = spec_of(kind) if kind else None
    preprocessing = Preprocessing(image_size=(32, 32), channels=spec)
    transform = BatchedTransform(
        MultiViewTransform(config, preprocessing, layout, (0.05, 0.3)), seed=2
    )
    pixels, sizes = padded(IMAGES)
    if spec is not None:
        shares = torch.cat([pixels, pixels[..., :1]], -1) / 255
        low, high = torch.tensor(spec.low), torch.tensor(spec.high)
        pixels = (low + shares * (high - low)).to(getattr(torch, kind))
    seeds = transform.seeds(torch.arange(4)[:, None])
    there = [tensor.cuda() for tensor in (pixels, sizes, seeds)]
    transform(*there)  # copies its constants
    with gpu_wait_is_an_error():
        made = transform(*there)
    assert made.is_cuda
    unit = 1e-3 if kind == "float32" else 1
    different = (made.cpu().double() - transform(pixels, sizes, seeds).double()).abs() / unit
    assert different.float().mean() < 0.01
    assert (different > 1).float().mean() < 0.001

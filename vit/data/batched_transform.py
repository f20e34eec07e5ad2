"""The training transform of a whole batch at once, on the device of its pixels.

    numbers of an image and a view    -> box, mirroring, shift, blur, colours
    rows    (out, height) matrix      resize, crop, mirroring, shift and blur from top to bottom
    columns (out, width) matrix       the same from left to right
    view = colours(solarised(rows @ image @ columns^T))

Crop, resize, mirroring, shift and blur are linear and separable, so each view is two products of
matrices, whatever of them it has. What it draws is that of `TrainingTransform`, from other random
numbers; what it computes differs by rounding, and blur is Gaussian instead of close to it.
Channels of instruments are moved to the low end of their range first, since float32 has few digits
for small differences of large values.

Nothing here waits for the device, and the processor launches as much for a batch of any size.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from vit.data.auto_augment import BLUR_SIGMA, LUMA, NOISE, THREE_JITTER
from vit.data.multi_view import LocalCrop, MultiViewTransform
from vit.data.preprocessing import Interpolation, Preprocessing
from vit.data.transforms import MAX_ATTEMPTS, TrainingTransform, Transform

CROP_NUMBERS = 4 * MAX_ATTEMPTS
NUMBERS = CROP_NUMBERS + 10
"""Random numbers of a view, without those of its channels."""
ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
CONTRAST, SATURATION = 1, 2
"""Positions in `auto_augment.COLOURS`."""


class Boxes(NamedTuple):
    """Boxes of images in pixels, each (images,)."""

    left: Tensor
    top: Tensor
    width: Tensor
    height: Tensor


class BatchedTransform:
    """`transform` of a batch of images, which must be without an `AugmentConfig.unbatched` and may
    give several views."""

    def __init__(self, transform: Transform, seed: int) -> None:
        self.seed = seed
        self.image_size = transform.image_size
        self.kinds: list[tuple[View, list[tuple[int, int]]]] = []
        """Views that differ only in their random numbers, with the (top, left) of each."""
        if isinstance(transform, MultiViewTransform):
            each = transform.global_view, transform.local_view
            for one, boxes in zip(each, transform.layout.boxes(), strict=True):
                if boxes:
                    self.kinds.append((View(one), boxes))
        else:
            assert isinstance(transform, TrainingTransform)
            self.kinds.append((View(transform), [(0, 0)]))
        self.num_views = sum(len(boxes) for _, boxes in self.kinds)

    def floats_of(self, height: int, width: int) -> int:
        """Numbers in the largest tensor for an image of (height, width), with all its views."""
        most = 0
        for view, boxes in self.kinds:
            rows, cols = view.image_size
            areas = (height * width, rows * width, rows * cols)
            sizes = [view.channels * area for area in areas] + [rows * height, cols * width]
            most = max(most, len(boxes) * max(*sizes, 2 * view.channel_numbers))
        return most

    def seeds(self, counters: Tensor) -> Tensor:
        """The seeds of the views of each image, (images, views) int64, from its counters, (images,
        counters) int64."""
        state = torch.full_like(counters[:, 0], self.seed)
        for counter in counters.unbind(1):
            state = mixed_bits(state + GOLDEN * (counter + 1))
        return mixed_bits(state[:, None] + GOLDEN * torch.arange(1, self.num_views + 1))

    def __call__(self, pixels: Tensor, sizes: Tensor, seeds: Tensor) -> Tensor:
        """Transform images.

        Args:
            pixels: RGB, (images, height, width, 3) uint8, or channels in their type; what is
                beyond an image's own size is not read.
            sizes: (height, width) of each, (images, 2).

        Returns:
            (images, channels, *image_size) of that type in channels-last memory format.
        """
        floats = pixels.float()
        result = pixels.new_zeros(len(pixels), *self.image_size, pixels.shape[-1])
        first = 0
        for view, boxes in self.kinds:
            count = len(boxes)
            flat = rearrange(seeds[:, first : first + count], "images views -> (views images)")
            images = floats.repeat(count, 1, 1, 1) if count > 1 else floats
            numbers = uniform_numbers(flat, NUMBERS + view.channel_numbers)
            views = view(images, sizes.repeat(count, 1), numbers)
            rows, cols = views.shape[1:3]
            for (top, left), made in zip(boxes, views.chunk(count), strict=True):
                result[:, top : top + rows, left : left + cols] = made
            first += count
        return rearrange(result, "images rows cols channels -> images channels rows cols")


class View:
    """One view of each image of a batch, by the settings of `transform`."""

    def __init__(self, transform: TrainingTransform) -> None:
        self.config = transform.config
        self.preprocessing = transform.preprocessing
        self.image_size = transform.preprocessing.image_size
        self.max_area = transform.max_area if isinstance(transform, LocalCrop) else 1.0
        three = self.config.auto_augment == "three"
        self.three = three
        self.jitter = self.config.color_jitter or (THREE_JITTER if three else 0.0)
        spec = self.preprocessing.channels
        self.spec, self.channels = spec, self.preprocessing.num_channels
        self.low = (0.0,) * 3 if spec is None else spec.low
        self.dtype: torch.dtype = getattr(torch, self.preprocessing.value_type)
        whole = not self.dtype.is_floating_point
        self.range = (0, torch.iinfo(self.dtype).max) if whole else (-math.inf, math.inf)
        """Of the values of the type."""
        values = self.channels * math.prod(self.image_size)
        self.channel_numbers = 3 + 2 * self.channels + values if spec and self.jitter else 0
        """Random numbers of a view for `varied`."""

    def __call__(self, images: Tensor, sizes: Tensor, numbers: Tensor) -> Tensor:
        """(images, height, width, 3) floats -> (images, *image_size, 3) uint8, or channels."""
        config = self.config
        sizes = sizes.to(numbers)
        boxes = self.boxes(sizes, numbers[:, :CROP_NUMBERS])
        which, strength, order, *factors = numbers[:, CROP_NUMBERS + 4 : NUMBERS].unbind(1)
        kind = (3 * which).long() if self.three else None  # greyscale, solarisation, blur
        low, high = BLUR_SIGMA
        sigma = None if kind is None else torch.where(kind == 2, low + (high - low) * strength, 0.0)
        rows, along = self.axis(0, boxes.top, boxes.height, images, sizes, numbers, sigma)
        columns, across = self.axis(1, boxes.left, boxes.width, images, sizes, numbers, sigma)
        zero = constant(self.low, images.device)
        if any(self.low):
            images = images - zero
        half = torch.bmm(rows, rearrange(images, "n rows cols c -> n rows (cols c)"))
        half = rearrange(half, "n rows (cols c) -> n cols (rows c)", c=self.channels)
        views = torch.bmm(columns, half)
        views = rearrange(views, "n cols (rows c) -> n rows cols c", c=self.channels)
        if config.translate:
            fill = constant(self.preprocessing.mean_colour, views.device).to(views) - zero
            uncovered = 1 - along[:, :, None] * across[:, None, :]
            views = views + uncovered[..., None] * fill
        if any(self.low):
            views = views + zero
        views = views.clamp(*self.range)
        if kind is not None:
            solarised = (kind == 1)[:, None, None, None]
            views = torch.where(solarised, torch.minimum(views, 255 - views), views)
        if self.channel_numbers:
            views = self.varied(views, numbers[:, NUMBERS:]).clamp(*self.range)
        elif self.jitter:
            grey = torch.zeros_like(which) if kind is None else (kind == 0).to(which)
            views = self.adjusted(views, grey, order, torch.stack(factors, 1))
        return (views if self.dtype.is_floating_point else views.round()).to(self.dtype)

    def axis(
        self,
        axis: int,
        start: Tensor,
        length: Tensor,
        images: Tensor,
        sizes: Tensor,
        numbers: Tensor,
        sigma: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`axis_matrix` of rows (axis 0) or columns (1), and what the shift leaves covered."""
        config, count = self.config, self.image_size[axis]
        mirrored = (config.vflip, config.hflip)[axis]
        flips, moves = numbers[:, CROP_NUMBERS + axis], numbers[:, CROP_NUMBERS + 2 + axis]
        shift = ((2 * moves - 1) * config.translate * count).round() if config.translate else None
        return axis_matrix(
            start,
            length,
            count,
            sizes[:, axis],
            images.shape[1 + axis],
            self.preprocessing.interpolation,
            flip=flips < mirrored if mirrored else None,
            shift=shift,
            sigma=sigma,
        )

    def boxes(self, sizes: Tensor, numbers: Tensor) -> Boxes:
        """The crops of images of `sizes`, (images, 2), from `numbers` in [0, 1)."""
        height, width = sizes.unbind(1)
        if self.config.min_crop == 1:
            return centre_boxes(self.preprocessing, height, width)
        attempts = rearrange(numbers, "n (attempts four) -> four n attempts", four=4)
        size, shape, right, down = attempts
        least, log_ratio = self.config.min_crop, math.log(self.config.crop_ratio)
        area = (width * height)[:, None] * (least + (self.max_area - least) * size)
        ratio = ((2 * shape - 1) * log_ratio).exp()
        widths, heights = (area * ratio).sqrt(), (area / ratio).sqrt()
        fits = (widths <= width[:, None]) & (heights <= height[:, None])
        first = fits.byte().argmax(1, keepdim=True)
        box_width, box_height, x, y = (
            each.gather(1, first)[:, 0] for each in (widths, heights, right, down)
        )
        none = ~fits.any(1)  # then the largest centred box of an allowed ratio
        largest = self.config.crop_ratio
        box_width = torch.where(none, torch.minimum(width, height * largest), box_width)
        box_height = torch.where(none, torch.minimum(height, width * largest), box_height)
        x, y = (torch.where(none, 0.5, each) for each in (x, y))
        return Boxes(x * (width - box_width), y * (height - box_height), box_width, box_height)

    def varied(self, views: Tensor, numbers: Tensor) -> Tensor:
        """As `ChannelJitter`: (images, height, width, channels), by (images, channel_numbers) in
        [0, 1)."""
        spec, strength, channels = self.spec, self.jitter, self.channels
        assert spec is not None
        low, high, mean = (constant(v, views.device) for v in (spec.low, spec.high, spec.mean))
        (scale, drop, chosen), drawn = numbers[:, :3].unbind(1), numbers[:, 3:]
        least, most = max(0.0, 1 - strength), 1 + strength
        factors = least + (most - least) * drawn[:, : 2 * channels]
        brightness, contrast = factors.view(-1, 2, 1, 1, channels).unbind(1)
        shares = (views - low) / (high - low) * brightness
        means = shares.mean((1, 2), keepdim=True)
        uniform = drawn[:, 2 * channels :].clamp(min=2**-25)  # 0 would be infinite
        noise = math.sqrt(2) * torch.erfinv(2 * uniform - 1).view_as(views)
        sigma = NOISE * strength * scale[:, None, None, None]
        shares = (shares - means) * contrast + means + sigma * noise
        if channels > 1:
            numbered = torch.arange(channels, device=views.device)
            left_out = (channels * chosen).long()[:, None] == numbered
            left_out &= (drop < strength / 3)[:, None]
            shares = torch.where(left_out[:, None, None], mean, shares)
        return shares * (high - low) + low

    def adjusted(self, views: Tensor, grey: Tensor, order: Tensor, numbers: Tensor) -> Tensor:
        """Greyscale, then brightness, contrast and saturation in random order, as `adjust_colours`
        but at once.

        Args:
            views: (images, height, width, 3) in [0, 255].
            grey: 1 where they lose their colours, else 0, (images,).
            order: Number in [0, 1) that chooses the order, (images,).
            numbers: Likewise each factor, (images, 3).
        """
        luma = views @ constant(LUMA, views.device)
        mean = luma.mean((1, 2))
        own, kept = 1 - grey, grey
        offset = torch.zeros_like(own)
        low, high = max(0.0, 1 - self.jitter), 1 + self.jitter
        factors = low + (high - low) * numbers
        orders = constant(ORDERS, views.device)[(len(ORDERS) * order).long()]
        for kind in orders.unbind(1):
            factor = factors.gather(1, kind[:, None])[:, 0]
            level = torch.where(kind == CONTRAST, (own + kept) * mean + offset, 0.0)
            mixed = factor * kept + (1 - factor) * (own + kept)
            kept = torch.where(kind == SATURATION, mixed, factor * kept)
            moved = factor * offset + (1 - factor) * level
            offset = torch.where(kind == SATURATION, offset, moved)
            own = factor * own
        own, kept, offset = (each[:, None, None] for each in (own, kept, offset))
        return (own[..., None] * views + (kept * luma + offset)[..., None]).clamp(0, 255)


def centre_boxes(preprocessing: Preprocessing, height: Tensor, width: Tensor) -> Boxes:
    """What `preprocessing` keeps of images of these sizes, which are whole numbers."""
    rows, cols = preprocessing.image_size
    full_rows, full_cols = (math.floor(side / preprocessing.crop_share) for side in (rows, cols))
    full_width, full_height = torch.full_like(width, full_cols), torch.full_like(height, full_rows)
    if preprocessing.resize == "crop":
        short = torch.minimum(width, height)
        full_width = (full_rows * width / short).floor()
        full_height = (full_rows * height / short).floor()
    x, y = width / full_width, height / full_height
    left, top = ((full_width - cols) / 2).round() * x, ((full_height - rows) / 2).round() * y
    return Boxes(left, top, cols * x, rows * y)


def axis_matrix(
    start: Tensor,
    length: Tensor,
    count: int,
    size: Tensor,
    extent: int,
    interpolation: Interpolation,
    *,
    flip: Tensor | None,
    shift: Tensor | None,
    sigma: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The linear map of one axis: resize a part, then mirror, shift and blur it.

    The filter becomes wider where an image shrinks, as Pillow's.

    Args:
        start, length: The part, in pixels, (images,).
        extent: Pixels of the axis, at least `size`.
        flip: Which are mirrored, (images,); None: none is.
        shift: By how many pixels each is moved, whole numbers, (images,); None: by none.
        sigma: Standard deviation of the blur in pixels of the result, 0 for none, (images,); None:
            nothing is blurred.

    Returns:
        Matrices, (images, count, extent), and the share of each pixel that is of the image and not
        uncovered by the shift, (images, count) or (count,).
    """
    places = torch.arange(count, device=start.device, dtype=start.dtype)
    moved = places if shift is None else places - shift[:, None]
    covered = ((moved >= 0) & (moved < count)).to(start)
    if flip is not None:
        moved = torch.where(flip[:, None], count - 1 - moved, moved)
    scale = (length / count)[:, None]
    centres = start[:, None] + (moved + 0.5) * scale
    pixels = torch.arange(extent, device=start.device, dtype=start.dtype)
    distance = (pixels + 0.5 - centres[..., None]) / scale.clamp(min=1)[..., None]
    weights = filter_weights(distance, interpolation)
    weights = weights * (pixels < size[:, None])[:, None]
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
    if shift is not None:
        weights = weights * covered[..., None]
    if sigma is None:
        return weights, covered
    gap = places[:, None] - places
    blur = (-0.5 * (gap / sigma.clamp(min=1e-3)[:, None, None]) ** 2).exp()
    blur = blur / blur.sum(-1, keepdim=True)
    if shift is not None:
        covered = torch.bmm(blur, covered[..., None])[..., 0]
    return torch.bmm(blur, weights), covered


def filter_weights(distance: Tensor, interpolation: Interpolation) -> Tensor:
    """Weights of pixels at a distance, in pixels, as Pillow's filters; not normalised."""
    far = distance.abs()
    if interpolation == "bilinear":
        return (1 - far).clamp(min=0)
    near = (1.5 * far - 2.5) * far**2 + 1
    tail = ((-0.5 * far + 2.5) * far - 4) * far + 2
    return torch.where(far < 1, near, torch.where(far < 2, tail, 0.0))


@lru_cache(maxsize=64)
def constant(values: tuple[Any, ...], device: torch.device) -> Tensor:
    """A tensor of `values` on a device, copied once: a copy waits for what the device computes."""
    return torch.tensor(values, device=device)


def uniform_numbers(seeds: Tensor, count: int = NUMBERS) -> Tensor:
    """Numbers in [0, 1) by hashing, (images, count) float32: the same for equal seeds, on every
    device.

    Source: SplitMix64, Steele et al., "Fast Splittable Pseudorandom Number Generators", figure 17,
    doi:10.1145/2660193.2660195.
    """
    steps = torch.arange(1, count + 1, device=seeds.device)
    bits = mixed_bits(seeds[:, None] + GOLDEN * steps)
    return ((bits >> 40) & 0xFFFFFF).float() / 2**24


GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIXERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def mixed_bits(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64, of int64 as if they had no sign."""

    def shifted(value: Tensor, by: int) -> Tensor:
        return (value >> by) & ((1 << (64 - by)) - 1)  # torch's shift repeats the sign

    first, second = MIXERS
    bits = (bits ^ shifted(bits, 30)) * first
    bits = (bits ^ shifted(bits, 27)) * second
    return bits ^ shifted(bits, 31)

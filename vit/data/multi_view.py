"""Several random views of an image in one tensor, for pretraining by comparing them (multi-crop).

    | global view   |      each global view is as wide as the tensor;
    | global view   |      smaller local views fill rows below them
    | local | local |

One tensor of bytes per image passes unchanged through the loader, its shared memory and the cache.

Source: Caron et al., "SwAV", section 3.3, arXiv:2006.09882 (multi-crop).
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vit.config import AugmentConfig
from vit.data.preprocessing import AnyImage, Box, Preprocessing
from vit.data.transforms import DECODE_MARGIN, PixelSource, TrainingTransform, random_crop_box


@dataclass(frozen=True)
class ViewLayout:
    """Where the views of an image are in its tensor, whose width is `side`, in pixels."""

    side: int
    local_side: int
    global_views: int
    local_views: int

    @property
    def per_row(self) -> int:
        """Local views beside each other."""
        return self.side // self.local_side

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of the tensor."""
        rows = math.ceil(self.local_views / self.per_row)
        return self.global_views * self.side + rows * self.local_side, self.side

    def boxes(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(top, left) of each global view, and of each local one."""
        below = self.global_views * self.side
        local = (divmod(number, self.per_row) for number in range(self.local_views))
        return (
            [(number * self.side, 0) for number in range(self.global_views)],
            [(below + row * self.local_side, col * self.local_side) for row, col in local],
        )

    def split(self, images: Tensor) -> tuple[Tensor, ...]:
        """(batch, 3, *image_size) -> global views, and local ones if any.

        Each is (views * batch, 3, side, side), view after view.
        """
        sides = (self.side, self.local_side)
        return tuple(
            torch.cat([images[..., top : top + side, left : left + side] for top, left in boxes])
            for side, boxes in zip(sides, self.boxes(), strict=True)
            if boxes
        )


class LocalCrop(TrainingTransform):
    """A TrainingTransform whose random crops have at most a share of the image's area."""

    def __init__(
        self,
        config: AugmentConfig,
        preprocessing: Preprocessing,
        *,
        max_area: float,
        fast_crop: bool = False,
    ) -> None:
        super().__init__(config, preprocessing, fast_crop=fast_crop)
        self.max_area = max_area

    def _sample_box(self, width: int, height: int) -> Box:
        config = self.config
        return random_crop_box(
            width, height, config.min_crop, config.crop_ratio, max_area=self.max_area
        )


class MultiViewTransform(TrainingTransform):
    """All views of an image, each augmented by itself; the image is decoded once.

    `local_crop` is the smallest and largest share of the area in a local view, below 1.
    """

    def __init__(
        self,
        config: AugmentConfig,
        preprocessing: Preprocessing,
        layout: ViewLayout,
        local_crop: tuple[float, float],
        *,
        fast_crop: bool = False,
    ) -> None:
        super().__init__(config, preprocessing, fast_crop=fast_crop)
        self.layout = layout
        self.image_size = layout.image_size
        small = dataclasses.replace(preprocessing, image_size=(layout.local_side,) * 2)
        local = dataclasses.replace(config, min_crop=local_crop[0])
        self.global_view = TrainingTransform(config, preprocessing, fast_crop=fast_crop)
        self.local_view = LocalCrop(local, small, max_area=local_crop[1], fast_crop=fast_crop)

    def __call__(self, image: AnyImage) -> Tensor:
        """RGB image -> (3, *layout.image_size) uint8."""
        return self._arrange(lambda transform: transform(image))

    def apply(self, source: PixelSource) -> Tensor:
        """`__call__` of the pixels of `source`, which is called once."""
        pixels = source(self._min_size if self.fast_crop else lambda width, height: (width, height))
        return self._arrange(lambda transform: transform.apply(lambda _min_size: pixels))

    def _min_size(self, width: int, height: int) -> tuple[int, int]:
        """Size of a reduced decode that suffices for the smallest crop of each kind."""
        each = [(self.layout.side, self.config.min_crop)]
        if self.layout.local_views:
            each.append((self.layout.local_side, self.local_view.config.min_crop))
        scale = max(side / math.sqrt(area) for side, area in each) * DECODE_MARGIN
        scale /= min(width, height)
        return min(math.ceil(width * scale), width), min(math.ceil(height * scale), height)

    def _arrange(self, view: Callable[[TrainingTransform], Tensor]) -> Tensor:
        tensor = self.blank()
        kinds = (self.layout.side, self.global_view), (self.layout.local_side, self.local_view)
        for (side, transform), boxes in zip(kinds, self.layout.boxes(), strict=True):
            for top, left in boxes:
                tensor[:, top : top + side, left : left + side] = view(transform)
        return tensor

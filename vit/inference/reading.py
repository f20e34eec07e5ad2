"""Files become prepared pictures; few large ones are open at once, whatever the threads."""

import threading
from collections.abc import Callable

from torch import Tensor

from vit.data.decoding import MAX_PIXELS, read_image
from vit.data.preprocessing import Preprocessing
from vit.errors import BadImage


class Window:
    """Pixels that may be decoded at the same time; one picture always may.

    Args:
        most: Pixels of all pictures together.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self.changed = threading.Condition()

    def take(self, pixels: int) -> None:
        """Wait until there is room for a picture; who waits holds none."""
        with self.changed:
            self.changed.wait_for(lambda: not self.held or self.held + pixels <= self.most)
            self.held += pixels

    def give(self, pixels: int) -> None:
        """A picture of so many pixels is done with."""
        with self.changed:
            self.held -= pixels
            self.changed.notify_all()


class Reader:
    """Reads and prepares one picture; any number of threads may ask at once.

    Args:
        preprocessing: Of the network.
        patch_size: Side of a patch, where pictures are shown whole; None for the usual square.
        crops: Five crops of each picture instead of one.
    """

    def __init__(
        self, preprocessing: Preprocessing, *, patch_size: int | None = None, crops: bool = False
    ) -> None:
        self.prepare: Callable[..., Tensor] = preprocessing
        if crops:
            self.prepare = preprocessing.crops
        elif patch_size is not None:
            self.prepare = lambda image: preprocessing.whole(image, patch_size)
        self.window = Window(MAX_PIXELS)

    def __call__(self, path: str) -> Tensor | BadImage:
        """uint8 (channels, height, width), with crops five of them, or why there is none."""
        held: list[int] = []

        def admit(pixels: int) -> None:
            self.window.take(pixels)
            held.append(pixels)

        try:
            return self.prepare(read_image(path, admit=admit))
        except BadImage as error:
            return error
        except (ValueError, OSError, MemoryError) as error:
            return BadImage(path, f"cannot be resized: {error}")
        finally:
            for pixels in held:
                self.window.give(pixels)

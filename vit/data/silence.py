"""Pillow's warnings are not for users of this package: a picture is good, or a BadImage."""

import threading
import warnings


class Quiet:
    """Silences Pillow's warnings while any thread reads; catch_warnings alone is not for threads.

    They tell of damage that is either harmless or reported as a BadImage, and with `-W error`
    they would refuse good pictures.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.readers = 0
        self.filters = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self.lock:
            if not self.readers:
                self.filters = warnings.catch_warnings()
                self.filters.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
            self.readers += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.readers -= 1
            if not self.readers:
                self.filters.__exit__(None, None, None)


QUIET = Quiet()

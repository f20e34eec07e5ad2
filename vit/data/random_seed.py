"""Randomness from counters: the same (seed, epoch, index) draws the same numbers anywhere.

Nothing has to be saved to resume, and neither the number of loader processes nor the number of
devices changes an image.
"""

import hashlib
import json


def random_seed(*counters: int | str) -> int:
    """A seed of 63 bits for the named draw, the same on every machine and version.

    Args:
        counters: What the draw is for, such as `(seed, "augment", epoch, index)`.
    """
    digest = hashlib.blake2b(json.dumps(counters).encode("ascii"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

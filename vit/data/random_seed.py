"""Counter-based seeds: the same (seed, epoch, index) gives the same random numbers on any machine.

A resumed run needs no saved generator state, and neither the number of loader processes nor the
number of devices changes how an image is augmented.
"""

import hashlib
import json


def random_seed(*counters: int | str) -> int:
    """Hash counters, such as `(seed, "augment", epoch, index)`, to a seed of 63 bits, the same on
    every machine and in every version."""
    digest = hashlib.blake2b(json.dumps(counters).encode("ascii"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

"""Wilson's interval of a share; imports no torch, for commands that start at once.

    (t + z²/2n ± z sqrt(t (1 - t)/n + z²/4n²)) / (1 + z²/n)          t: share of n trials

Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", Journal of
the American Statistical Association 22, 1927.
"""

import math

Z95 = 1.959963984540054  # the standard normal's 97.5 % point


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """95 % interval of a share, which stays inside [0, 1] and is honest at 0 and at 1."""
    share, spread = successes / trials, Z95**2 / trials
    centre = (share + spread / 2) / (1 + spread)
    half = Z95 / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    low = 0.0 if successes == 0 else centre - half
    return low, 1.0 if successes == trials else centre + half

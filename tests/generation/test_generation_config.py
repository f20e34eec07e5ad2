"""Settings that contradict each other are refused in one line."""

import pytest

from vit.errors import ConfigError
from vit.generation.generation_config import Search


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"beams": 2, "n_best": 3}, "n_best=3: is more than beams=2"),
        ({"n_best": 2}, "n_best=2: is more than beams=1"),
        ({"beams": 4, "temperature": 0.7}, "set beams=1, or leave out temperature=0.7"),
        ({"length_penalty": 0.6}, "length_penalty=0.6: ranks beams"),
        ({"temperature": 1e-9}, "temperature=1e-09: must be 0, or from 0.001 to 1000"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9: is more than max_tokens=8"),
    ],
)
def test_contradicting_settings_are_refused_in_one_line(settings, says):
    with pytest.raises(ConfigError) as error:
        Search(**settings)
    assert says in str(error.value)
    assert "\n" not in str(error.value)

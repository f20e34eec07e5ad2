"""SimCLR's loss against the paper's, pair by pair, and images of other processes."""

import math

import pytest
import torch
from torch.nn import functional as F

from vit.tasks.simclr import contrastive_losses, gather_views


def nt_xent(pairs, temperature):
    """NT-Xent of the paper's algorithm 1: the mean of l(2k-1, 2k) + l(2k, 2k-1), written out.

    Args:
        pairs: Two views of each image, [(first, second)], of vectors of unit length.
    """
    rows = [view for pair in pairs for view in pair]
    similar = [[float(a @ b) / temperature for b in rows] for a in rows]

    def loss(i, j):
        others = sum(math.exp(similar[i][k]) for k in range(len(rows)) if k != i)
        return -math.log(math.exp(similar[i][j]) / others)

    found = [loss(2 * k, 2 * k + 1) + loss(2 * k + 1, 2 * k) for k in range(len(pairs))]
    return sum(found) / len(rows)


def embeddings(*shape):
    torch.manual_seed(0)
    return F.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def losses(views, temperature=0.2, global_views=2):
    own = torch.arange(views.shape[1])
    return contrastive_losses(views, views, own, global_views=global_views, temperature=temperature)


@pytest.mark.parametrize("images", [1, 2, 7])
def test_two_views_give_nt_xent(images):
    views = embeddings(2, images, 5)
    found = losses(views).mean()
    expected = nt_xent([*zip(*views, strict=True)], 0.2)
    assert float(found) == pytest.approx(expected, abs=1e-9)


def test_local_views_are_found_by_global_ones_and_search_for_nothing():
    views = embeddings(3, 6, 5)  # two global views, one local one
    found = losses(views)
    pairs = [(0, 1), (1, 0), (0, 2), (1, 2)]
    expected = []
    for image in range(6):
        terms = []
        for first, second in pairs:
            every = [float(views[first][image] @ views[second][m]) / 0.2 for m in range(6)]
            every += [
                float(views[first][image] @ views[first][m]) / 0.2 for m in range(6) if m != image
            ]
            terms.append(math.log(sum(map(math.exp, every))) - every[image])
        expected.append(sum(terms) / 4)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


class Process:
    """What `gather_views` uses of a training, in one of several processes."""

    def __init__(self, config, total):
        self.config, self.sum_over_processes = config, total


def test_images_of_other_processes_are_told_apart_too(config_of):
    config = config_of("simclr", batch_size=12)
    views = embeddings(2, 9, 4)
    whole = losses(views)
    places = torch.tensor([3, 0, 7, 1, 11, 2, 8, 10, 4])  # 5, 6, 9 could not be read
    parts = [slice(0, 4), slice(4, 9), slice(0, 0)]
    messages = []

    def record(mine):
        messages.append(mine)
        return mine

    for part in parts:
        gather_views(Process(config, record), views[:, part], places[part])
    everyone = sum(messages)
    found = []
    for part in parts:
        process = Process(config, lambda _mine: everyone)
        keys, present = gather_views(process, views[:, part], places[part])
        assert int(present.sum()) == 9
        settings = {"global_views": 2, "temperature": 0.2}
        found.append(
            contrastive_losses(views[:, part], keys, places[part], present=present, **settings)
        )
    torch.testing.assert_close(torch.cat(found), whole)


def test_it_falls_where_views_agree_and_images_differ():
    apart = torch.eye(8, dtype=torch.float64)
    alike = torch.ones(8, 8, dtype=torch.float64) / math.sqrt(8)
    assert float(losses(torch.stack([apart, apart])).mean()) < 0.1
    assert float(losses(torch.stack([alike, alike])).mean()) == pytest.approx(math.log(15))

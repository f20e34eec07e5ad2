"""The order of images: dense and different ones, uncertain ones, each once."""

from itertools import islice

import torch

from vit.inference.active_learning import (
    class_margins,
    neighbour_shares,
    order_by_typicality,
    order_by_uncertainty,
    typicality,
    unit_directions,
)


def pool(sizes, dim=16, spread=0.5):
    """Features of classes of so many images, and the classes."""
    draw = torch.Generator().manual_seed(3)
    labels = torch.repeat_interleave(torch.tensor(sizes))
    centres = torch.nn.functional.normalize(torch.randn(len(sizes), dim, generator=draw), dim=1)
    noise = spread * torch.randn(len(labels), dim, generator=draw) / dim**0.5
    return unit_directions(centres[labels] + noise), labels


def none(features):
    return torch.zeros(len(features), dtype=torch.bool)


def test_the_most_typical_images_are_those_in_dense_regions():
    features, _ = pool([200])
    distances = torch.cdist(features, features).sort(dim=1).values[:, 1:21].mean(dim=1)
    found = typicality(features)
    assert torch.equal(found.argsort(descending=True)[:20], distances.argsort()[:20])


def test_copies_of_an_image_do_not_make_it_typical():
    features, _ = pool([60])
    copied = torch.cat([features, features[7:8].expand(45, -1)])
    assert typicality(copied)[7] == 0
    assert int(typicality(copied).argmax()) < 60


def test_a_first_image_of_each_separate_class_comes_first_and_every_image_once():
    features, labels = pool([80, 6, 40, 20], spread=0.1)
    order = [*order_by_typicality(features, 4, none(features), seed=0)]
    assert {*labels[order[:4]].tolist()} == {0, 1, 2, 3}
    assert labels[order[0]] == 0  # the largest
    assert sorted(order) == [*range(len(features))]


def test_clusters_that_have_a_label_come_later():
    features, labels = pool([80, 30, 40], spread=0.1)
    labelled = none(features)
    labelled[[0, 1, 85]] = True
    first = next(order_by_typicality(features, 1, labelled, seed=0))
    assert labels[first] == 2
    assert not {0, 1, 85} & {*order_by_typicality(features, 1, labelled, seed=0)}


def test_uncertain_images_come_first_and_are_different():
    features, labels = pool([50, 50, 50], spread=0.1)
    margins = torch.ones(150)
    uncertain = [*range(20), *range(50, 55), *range(100, 105)]
    margins[uncertain] = 0.1
    order = [*order_by_uncertainty(features, margins, 3, none(features), seed=0)]
    assert {*labels[order[:3]].tolist()} == {0, 1, 2}
    assert {*order[:3]} <= {*uncertain}
    assert sorted(order) == [*range(150)]


def test_margins_of_one_class_and_of_several():
    rows = torch.tensor([[0.5, 0.4, 0.1], [0.05, 0.9, 0.05]])
    torch.testing.assert_close(class_margins(rows), torch.tensor([0.1, 0.85]))
    found = class_margins(rows, [0.5, 0.2, 0.8])
    torch.testing.assert_close(found, torch.tensor([0.0, 0.45]))


def test_shares_of_neighbours_are_those_of_the_cosines():
    features, labels = pool([10, 10], spread=0.9)
    known = torch.tensor([0, 3, 12, 15])
    targets = torch.nn.functional.one_hot(labels[known])
    cosines = features @ features[known].T
    expected = (cosines / 0.07).softmax(dim=1) @ targets.float()
    torch.testing.assert_close(neighbour_shares(features, known, targets), expected)


def test_suggested_images_of_an_imbalanced_pool_cover_more_classes_than_random_ones():
    features, labels = pool([600, 300, *[60] * 4, *[12] * 14], dim=32, spread=0.7)
    draw = torch.Generator().manual_seed(0)

    def classes(places):
        return len(labels[torch.as_tensor(places)].unique())

    ours = [
        classes([*islice(order_by_typicality(features, 40, none(features), seed=seed), 40)])
        for seed in range(5)
    ]
    random = [classes(torch.randperm(len(labels), generator=draw)[:40]) for _ in range(100)]
    assert min(ours) > sum(random) / len(random) + 4

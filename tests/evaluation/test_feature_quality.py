"""k-means against scikit-learn."""

import pytest
import torch

from vit.evaluation.feature_quality import kmeans, nearest_centres


def blobs(sizes: list[int], dim: int = 8, spread: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    labels = torch.repeat_interleave(torch.tensor(sizes))
    centres = torch.randn(len(sizes), dim, generator=draw)
    return centres[labels] + spread * torch.randn(len(labels), dim, generator=draw), labels


@pytest.mark.parametrize("weighted", [False, True])
def test_the_objective_is_that_of_scikit_learn(weighted):
    cluster = pytest.importorskip("sklearn.cluster")
    points, _ = blobs([40, 7, 90, 25, 60], spread=0.8)
    weights = torch.rand(len(points), generator=torch.Generator().manual_seed(2))
    weights = weights if weighted else torch.ones(len(points))
    found = kmeans(points, 12, seed=0, weights=weights)
    theirs = cluster.KMeans(12, n_init=1, random_state=0)
    theirs.fit(points.numpy(), sample_weight=weights.numpy())
    objective = float((found.squares * weights).sum())
    assert objective <= 1.05 * theirs.inertia_
    exact = (points - found.centres[found.assigned]).square().sum(dim=1)
    torch.testing.assert_close(found.squares, exact, atol=1e-4, rtol=1e-4)
    for one in range(12):
        inside = found.assigned == one
        mean = (points[inside] * weights[inside, None]).sum(0) / weights[inside].sum()
        torch.testing.assert_close(found.centres[one], mean, atol=1e-4, rtol=1e-4)


def test_separate_groups_are_the_clusters_and_the_seed_decides():
    points, labels = blobs([30, 4, 80], spread=0.05)
    first, again = (kmeans(points, 3, seed=5) for _ in range(2))
    assert torch.equal(first.centres, again.centres)
    pairs = {*zip(labels.tolist(), first.assigned.tolist(), strict=True)}
    assert len(pairs) == 3


def test_equal_points_and_a_cluster_for_each_point():
    points = torch.tensor([[1.0, 0.0]] * 5 + [[0.0, 1.0]])
    found = kmeans(points, 6, seed=0)
    assert float(found.squares.sum()) < 1e-6
    assert found.assigned[0] != found.assigned[5]
    assigned, _ = nearest_centres(points, found.centres)
    assert torch.equal(assigned, found.assigned)

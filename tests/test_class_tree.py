"""The tree of classes against a second implementation, on random trees."""

import random

import numpy as np
import pytest

from vit.class_tree import (
    ROOT,
    ClassTree,
    answer_of,
    by_last_name,
    depth,
    distance,
    is_at_or_above,
    parent,
    wrong_from,
)


def random_classes(source: random.Random) -> list[str]:
    """Paths of up to four levels, some of which have others under them."""
    names = ["a", "b", "c", "aa", "a-b", "B", "é"]
    paths = {
        "/".join(source.choices(names, k=source.randint(1, 4)))
        for _ in range(source.randint(1, 25))
    }
    return sorted(paths)


def is_above(node: tuple[str, ...], path: tuple[str, ...]) -> bool:
    return path[: len(node)] == node


def slow_path(classes, probabilities):
    """The most probable child of each node, by sets of tuples."""
    leaves = [tuple(name.split("/")) for name in classes]
    nodes = {leaf[:end] for leaf in leaves for end in range(1, len(leaf) + 1)}

    def mass(node):
        return sum(p for leaf, p in zip(leaves, probabilities, strict=True) if is_above(node, leaf))

    node, found = (), []
    while True:
        children = [one for one in nodes if len(one) == len(node) + 1 and is_above(node, one)]
        own = sum(p for leaf, p in zip(leaves, probabilities, strict=True) if leaf == node)
        if not children or own > max(map(mass, children)):
            return found
        node = max(children, key=mass)
        found.append(("/".join(node), mass(node)))


@pytest.mark.parametrize("seed", range(60))
def test_paths_and_answers_equal_a_search_of_all_nodes(seed):
    source, numbers = random.Random(seed), np.random.default_rng(seed)
    classes = random_classes(source)
    tree = ClassTree(classes)
    probabilities = numbers.dirichlet(np.full(len(classes), 0.4), size=5)
    for path, row in zip(tree.paths(probabilities), probabilities, strict=True):
        expected = slow_path(classes, row)
        assert [node for node, _ in path] == [node for node, _ in expected]
        np.testing.assert_allclose([p for _, p in path], [p for _, p in expected], atol=1e-12)
        for threshold in (0.0, 0.3, 0.6, 0.95, 1.1):
            deep = [one for one in path if one[1] >= threshold]
            assert answer_of(path, threshold) == ([(ROOT, 1.0), *deep])[-1]
        for label in classes:
            wrong = [
                p
                for node, p in expected
                if not is_above(tuple(node.split("/")), tuple(label.split("/")))
            ]
            assert wrong_from(path, label) == pytest.approx(max(wrong, default=-1.0))
    table = tree.node_probabilities(probabilities)
    for place, node in enumerate(tree.nodes):
        under = [n for n, name in enumerate(classes) if is_at_or_above(node, name)]
        np.testing.assert_allclose(table[:, place], probabilities[:, under].sum(1), atol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_distances_are_those_of_a_walk_over_edges(seed):
    nodes = [ROOT, *ClassTree(random_classes(random.Random(seed))).nodes]
    for one in nodes:
        steps, reached = {one: 0}, [one]
        for node in reached:
            near = [x for x in nodes if x != node and (parent(x) == node or x == parent(node))]
            for other in near:
                if other not in steps and other != node:
                    steps[other] = steps[node] + 1
                    reached.append(other)
        assert steps == {other: distance(one, other) for other in nodes}
        assert depth(one) == distance(ROOT, one)


def test_names_are_found_in_the_tree():
    tree = ClassTree(["a/b/c", "a/b/d", "a/b", "e"])
    assert tree.nodes == ("a", "a/b", "a/b/c", "a/b/d", "e")
    assert tree.known("a/b/new/leaf") == "a/b"
    assert tree.known("ab/b") == ROOT
    assert is_at_or_above("a/b", "a/b")
    assert not is_at_or_above("a/b", "a/bc")
    assert by_last_name(["a/cat", "b/dog", "c/dog"]) == {"cat": "a/cat"}


def test_a_class_with_others_under_it_ends_the_path_where_it_is_the_most_probable():
    tree = ClassTree(["a", "a/b", "c"])
    (path,) = tree.paths(np.array([[0.5, 0.3, 0.2]]))
    assert path == [("a", pytest.approx(0.8))]

"""Locks of files: two open files of one process stand for two processes."""

import pytest

from vit.file_lock import lock_file, locked

pytest.importorskip("fcntl")


@pytest.mark.parametrize(
    ("first", "second", "both"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_only_shared_locks_are_held_together(first, second, both, tmp_path):
    with (tmp_path / "lock").open("ab") as one, (tmp_path / "lock").open("ab") as other:
        assert lock_file(one, shared=first)
        assert lock_file(other, shared=second) == both
        one.close()
        assert lock_file(other, shared=second)


def test_a_locked_path_is_free_again_after_the_block(tmp_path):
    with locked(tmp_path / "lock"), (tmp_path / "lock").open("ab") as other:
        assert not lock_file(other)
    with (tmp_path / "lock").open("ab") as other:
        assert lock_file(other)

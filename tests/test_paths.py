"""Folders of the package."""

from pathlib import Path

from vit.paths import user_cache


def test_user_cache_is_in_xdg_cache_home_where_it_is_absolute(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "vit-toolkit"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/to/be/ignored")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert user_cache() == Path("/home/somebody/.cache/vit-toolkit")

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_worker_ext.patching import manifest
from tests.patching.small import Small, make_patches, make_tree


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Small:
    """A small engine, with patches that take the place of the package's own."""
    made = Small(tmp_path / "site-packages", tmp_path / "patches")
    make_tree(made.root)
    make_patches(made.patches)
    monkeypatch.setattr(manifest, "patches_directory", lambda: made.patches)
    return made

"""Makes what test modules share importable by name, and keeps their tokens out of the user's cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from comb_training.data import token_cache


@pytest.fixture(autouse=True, scope="session")
def _tokens_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("tokens")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "default_folder", lambda: folder)
        yield

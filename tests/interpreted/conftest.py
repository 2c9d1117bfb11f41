"""Triton interprets, from before anything imports it."""

from __future__ import annotations

import os
import sys

import pytest

from tests.helpers.plugin import plugin as plugin

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.exit("tests/interpreted wants a process of its own: pytest tests/interpreted, and nothing else", 4)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton is not installed: pip install triton")

"""``python -m comb_training.answers CONFIG ...``: the same as ``comb answers``, for ``torchrun -m``."""

from __future__ import annotations

import sys

from comb.cli.main import main

if __name__ == "__main__":
    main(["answers", *sys.argv[1:]])

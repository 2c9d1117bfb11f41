"""Publish an adapter with its card, and load it again as anybody would.

python examples/publish.py OUTPUT_DIR you/comb-my-backbone     # after `hf auth login`, or with HF_TOKEN
"""

import sys

from comb import CombForCausalLM
from comb.hub.push import plan_push, push


def main(folder: str, repo: str) -> None:
    plan = plan_push(folder, repo)
    print("files:", ", ".join(name for name, _ in plan.files))
    for warning in plan.warnings:
        print("warning:", warning)
    print(push(folder, repo))
    model = CombForCausalLM.from_pretrained(repo)
    model.print_trainable_parameters()


if __name__ == "__main__":
    main(*sys.argv[1:])

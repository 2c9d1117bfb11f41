"""Train an encoder for a backbone of your own (any Hub id, folder or GGUF file) on a dataset of your own.

    python examples/train_encoder.py BACKBONE DATA OUTPUT_DIR [section.key=value ...]

DATA is a file, a folder or a set on the Hub of rows {"documents": ["..."], "query": "...", "answer": "..."}. What a run
costs, before it is started:

    comb train configs/nano.yaml model=BACKBONE data=DATA model.num_encoder_layers=8 train.batch_size=8 \\
        train.ce_weight=0 train.kl_weight=1 --dry-run
"""

import sys

from comb_training.config import load_config
from comb_training.train import run_training

START = [
    "train.answers=on_policy",  # the backbone's own answers, with the documents in its prompt
    "train.ce_weight=0",
    "train.kl_weight=1",  # learn its whole distribution there
    "train.learning_rate=6e-4",
    "train.batch_size=8",
    "train.max_seconds=3600",
]


def main(backbone: str, data: str, output_dir: str, *more: str) -> None:
    where = [f"model.backbone={backbone}", f"data={data}", f"train.output_dir={output_dir}"]
    result = run_training(load_config(None, [*where, *START, *more]))
    print(
        f"{result.record['steps']} steps in {result.record['seconds']:.0f} s, loss {result.record['losses'][-1][1]:.3f}"
    )
    print(f"adapter, card and loss plot are in {result.checkpoint or result.output_dir}")


if __name__ == "__main__":
    main(*sys.argv[1:])

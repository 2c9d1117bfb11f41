"""How the nano backbones are made: tokenizer, structured start, curriculum; and the hybrid from the nano.

For maintainers: `scripts/pretrain-nano` and `scripts/pretrain-nano-hybrid` write the two checkpoints in
`comb_training.nano`, whose world the backbones are taught. No part of the package.
"""

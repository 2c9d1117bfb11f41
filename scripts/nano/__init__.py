"""How the nano backbones are made: tokenizer, structured start, curriculum; the hybrid from the nano; the ledger.

For maintainers: `scripts/pretrain-nano`, with `hybrid` and with `ledger`, writes the checkpoints in
`comb_training.nano`, whose tasks the backbones are taught. No part of the package.
"""

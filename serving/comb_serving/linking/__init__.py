"""Documents of plain models, linked inside vLLM without training: what front and engine have in common.

In: a prompt's token ids with its documents standing in them, and a method such as ``legolink:16`` (`methods`). Out:
which tokens come from the pool and which are computed again (`layout`). No vLLM here: what runs inside of it is
`comb_serving.vllm.linking`.
"""

"""The trained adapter: an encoder that compiles documents, and the cross blocks that a frozen backbone reads them with.

A backbone or the name of a checkpoint enters `modeling.CombForCausalLM`, token ids enter its `encode`; PICaches leave
it, and the backbone's own outputs. `config` says what an adapter looks like, `initialization` what it starts from,
`adapter` and `weights` how it is saved and loaded, `conversion` how the published COMB release becomes one, `source`
how another process loads the same model.
"""

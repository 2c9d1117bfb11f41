"""Trained link tokens: learned vectors in front of every document while it is compiled, a small adapter.

A backbone or the name of a checkpoint enters `modeling.LinkTokensForCausalLM`. Keys and values of the front leave its
`link_front`, behind which `comb.methods.linktokens` compiles documents; logits of whole rows of linked documents leave
its `forward`, by which it is trained. `config` says what an adapter looks like, `front` holds what is learned.
"""

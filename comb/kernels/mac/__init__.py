"""One decode step of Match-Amend-Complete attention: the plain step, the kernels that compute the same, their state.

`step.step` says what is computed, `dispatch.computed_step` chooses between it and the kernels, `mac_config.MacConfig`
and `state.MacState` are what both take, `fill.prompt_rows` makes the entries that a prompt leaves. `comb.mac` is on
top.
"""

"""A request's way from HTTP to vLLM and back, down the floors once: this is the ASGI middleware around vLLM's server.

`middleware` looks at a request's route and key (`routes`: an allow-list) and reads its body (`http`); `preprocessor`
takes documents out of its `fields`, asks `choice` how they are linked and builds the prompt, in whichever way the
client writes its `conversation`; the manager, a floor below, leases the documents' places in the pool; vLLM gets the
request with a capability, and `response` puts into its answer, and into the log, what became of the documents.
`own_routes` are those that vLLM hasn't, `registered` what tenants have given them to keep, `cohere` the chat of
Cohere's clients; `metrics` counts. `front` is what stays from request to request: it is checked at start and, on
demand, while it runs (`self_check`). Others use `middleware.CombMiddleware` (by name, as vLLM's ``--middleware``), and
`comb_serving.offline` the preprocessor.
"""

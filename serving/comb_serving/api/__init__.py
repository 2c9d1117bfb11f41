"""A request's way from HTTP to vLLM and back, down the floors once: this is the ASGI middleware around vLLM's server.

`middleware` reads the request (`body`) and looks at the key; `preprocessor` takes documents out of its `fields` and
builds the prompt; the manager, a floor below, leases the documents' places in the pool; their handles go into the
request that vLLM gets, and `response` puts into its answer what became of them. `documents` and `encoder_switch` are
the routes that vLLM hasn't; `errors`, `metrics` and `request_log` say what happened. Others use
`middleware.CombMiddleware` (by name, as vLLM's ``--middleware``), and `comb_serving.offline` the preprocessor.
"""

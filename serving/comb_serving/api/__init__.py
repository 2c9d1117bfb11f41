"""A request's way from HTTP to vLLM and back, down the floors once: this is the ASGI middleware around vLLM's server.

`middleware` looks at a request's route (`routes`: an allow-list) and key and reads its `body`; `preprocessor` takes
documents out of its `fields`, asks `choice` how they are linked and builds the prompt, in whichever way the client
writes its `conversation`; the manager, a floor below, leases the documents' places in the pool; vLLM gets the request
with a capability, and `response` puts into its answer what became of the documents. `documents` and `switch` are the
routes that vLLM hasn't; `request_error`, `metrics` and `request_log` say what happened. `front` is what stays from
request to request: it is checked at start (`start_check`), and on demand while it runs (`audit`). Others use
`middleware.CombMiddleware` (by name, as vLLM's ``--middleware``), and `comb_serving.offline` the preprocessor.
"""

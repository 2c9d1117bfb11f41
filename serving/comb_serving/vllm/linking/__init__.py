"""Documents of plain models inside vLLM: no trained part, no patch; scheduler, KV connector and worker are options.

A document is a request of its own whose prompt it is (`Capability` with the method ``COMPILE``). When it has been
computed, the worker copies its keys and values out of vLLM's cache into the pool. A request that links documents gets
all blocks at once: the worker writes documents from the pool into them, keys re-rotated; the scheduler has seams
computed as rows of a step, which share the request's blocks. All rows of a step write their keys and values in a layer
before any of them attends, so one step is exact, the question's rows in it too. What doesn't fit into the step in which
a request begins waits, as vLLM's requests do whose cache comes from elsewhere. Then it goes on like one with a cached
prefix. Where the question chooses what is computed again, its rows come first, over what is linked (`looks`).

`scheduler` (what is computed when, and under which hash), `connector` (what is told to the worker), `links` (what a
request wants, and the commands that follow from it), `pool_worker` and `document_pool` (the documents), `states` (those
of linear layers), `positions` (how keys are re-rotated), `cache_access` (vLLM's cache), `setup` (its options).
"""

"""Several `comb serve` behind one address, on Ray Serve (`docs/replicas.md`): requests go where their documents are.

`application` is what `serve run` and `serve deploy` start: an ingress that reads a request's documents, and Ray
replicas that own one `comb serve` each (`replica`). Which replica gets a request is Ray Serve's routing with an order
of its own (`affinity`); what clients have registered outlives both sides.
"""

"""`comb bench serve`, as the command line knows it: what it runs takes torch and transformers."""

from __future__ import annotations

from comb.bench.harness import BenchmarkReport, benchmark
from comb_serving.bench.options import ServeBenchOptions


@benchmark("serve", lambda rows: ())  # a run has tables and panels of its own, which know its facts
def serve(options: ServeBenchOptions, report: BenchmarkReport) -> None:
    """`comb serve` against plain vLLM over HTTP: TTFT, throughput, bytes, start-up, memory (COMB Fig. 5a and 10)."""
    from comb_serving.bench.serve_run import serve_in_turns

    serve_in_turns(options, report)

"""What benchmarks measure on: random models and prompts, streams, cases of kernels. It takes torch, so that benchmarks
import it when they run: `comb bench` imports them all for their options.
"""

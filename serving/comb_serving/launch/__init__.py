"""Servers as processes: what `comb serve` checks (`preflight`) and starts (`launcher`), and any server as a child that
is awaited, watched and ended with all below it (`server_process`; replicas and the benchmark have theirs so).
"""

"""One run's optimisation: from prepared examples to trained weights, on one process or many, to be stopped and resumed.

`prepare` makes a `PreparedRun` of a configuration; `CombTrainer` takes its model and examples with a `TrainConfig`,
trains, and writes checkpoints, records and the adapter: sampler, objective (losses), trainer, run_log, checkpoints.
"""

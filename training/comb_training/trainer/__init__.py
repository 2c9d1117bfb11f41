"""One run's optimisation: from prepared examples to trained weights, on one process or many, to be stopped and resumed.

`prepare` makes a `PreparedRun` of a configuration; `CombTrainer` takes its model and examples with a `TrainConfig`,
trains, and writes checkpoints, records and the adapter. A file is a step of it: sampler -> objective -> trainer (the
loop) -> run_log, heldout, checkpoints. Others also use `distributed`, `BatchSampler`, the losses and the schedule.
"""

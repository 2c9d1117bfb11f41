"""Training encoders for comb: data, the backbone's own answers, the trainer, the plan of a run, the nano backbones."""

"""Dataset readers, one file per dataset; `comb_training.plugin.register` names them in `comb.evaluation.datasets`."""

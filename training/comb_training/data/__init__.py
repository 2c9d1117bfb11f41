"""Dataset readers, one file per dataset; `comb_training.plugin.register` names them in `comb.documents.datasets`."""

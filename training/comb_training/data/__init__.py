"""Dataset readers, one file per dataset in `readers`, each with its decorator; tokens, mixtures and batches of them."""

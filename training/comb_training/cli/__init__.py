"""The commands that training adds to `comb`: train, answers, eval and demo. `comb_training.plugin` registers them."""

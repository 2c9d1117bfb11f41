"""The commands that training adds to `comb`, a file each: train, answers, eval and demo.

Options enter, printed results leave; what is computed stands in the rooms below. `comb_training.plugin` registers them.
"""

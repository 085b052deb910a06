"""Choose the batch size by arithmetic: request → problem → batch → strategy → hyperparameters → plan.

`request.py` checks the arguments; `problem.py` resolves them to a machine, a base run and a budget of samples; `estimator.py`
predicts memory and seconds of a strategy; `choose_batch.py`, `search.py`, `hyperparameters.py` and `alternatives.py` decide and
compare; `planner.py` calls them in this order and returns the `Plan` of `plan.py`.
"""

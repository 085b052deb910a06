"""A fuzzer of everything that megabatch reads from outside: configuration, arguments, files of other tools, data, checkpoints.

`python -m fuzz` runs it (see `make fuzz`); `values` and `mutations` make hostile input, `settings`, `arguments` and `files` hold
the targets, `harness` runs them in processes of their own and reports what breaks the rule: nothing but ValueError (OSError for
files), no crash, no input that takes longer than 5 seconds.
"""

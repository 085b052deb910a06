"""A fuzzer for all untrusted input of megabatch: configuration, arguments, files of other tools, data, checkpoints.

`python -m fuzz` runs it (see `make fuzz`). `values` and `mutations` make hostile input; `settings`, `arguments` and `files` hold
the targets; `harness` runs them in separate processes and reports every input that breaks the rules: only ValueError (OSError for
files), no crash, at most 5 seconds.
"""

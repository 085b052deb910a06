"""The call signatures of other libraries for megabatch's losses, nothing else."""

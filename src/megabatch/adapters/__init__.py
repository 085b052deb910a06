"""Other people's call signatures for our losses, nothing else."""

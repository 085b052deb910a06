"""Choose, by arithmetic: which batch, why, what it takes, and a file that runs."""

"""Kernels for Hopper alone, in Gluon: those of ../stats.py and ../gradient.py without most of the options, closer to the device."""

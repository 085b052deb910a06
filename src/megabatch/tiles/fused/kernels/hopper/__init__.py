"""Kernels for Hopper alone, in Gluon: the fast launches of those in .., without most of the options, closer to the device."""

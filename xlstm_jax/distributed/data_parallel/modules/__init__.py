"""Modules that keep their parameters sharded: Linen's and NNX's, entered in one way (``unit``)."""

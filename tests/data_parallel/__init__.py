"""Sharding, gathering and synchronising of parameters, and the modules around them."""

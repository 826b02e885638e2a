"""Tests of sharding, gathering and synchronising parameters, and of the module wrappers."""

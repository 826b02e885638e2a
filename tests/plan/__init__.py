"""Tests of the plan of sharding."""

"""Tests of the project: pages, layers, wheel, and the test suite."""

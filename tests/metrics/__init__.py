"""Tests of metrics on many devices, their states and their files."""

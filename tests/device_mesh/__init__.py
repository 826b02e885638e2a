"""Tests of meshes of devices, and of the layout of batches."""

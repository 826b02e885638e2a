"""Meshes of devices, and batches on them."""

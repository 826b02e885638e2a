"""Faults in a running job."""

"""Tests of faults in a running job."""

"""Tests of steps, states, losses, evaluation, and the checks of steps."""

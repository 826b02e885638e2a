"""Checks of what users pass: the arguments of steps, the same in all processes, and mistakes that would run."""

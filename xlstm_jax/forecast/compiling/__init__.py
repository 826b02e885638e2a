"""Compilation of steps: for the devices at hand in this process, or for an absent topology in a child process."""

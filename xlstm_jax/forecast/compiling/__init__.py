"""Compilation of steps: for the CPU in this process, or for an absent topology in a child process."""

"""Replay of steps against silent data corruption: names a device that computes wrong numbers before the update.

watched_sends   adds digests of sent values to the program of a device
replayed_step   runs the program twice, the second time with each device's work on a neighbour, and compares digests
"""

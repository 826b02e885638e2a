"""Replay of steps against silent data corruption: a device that computes wrong numbers is named before the update.

watched_sends   digests of everything that a device sends to other devices, as part of a device's program
replayed_step   runs the program twice, the second time with each device's work on a neighbour, and compares digests
"""

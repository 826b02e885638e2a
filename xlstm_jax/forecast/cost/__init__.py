"""Cost of a compiled program: memory, traffic, cycles and FLOP, and the least time by a chip's figures."""

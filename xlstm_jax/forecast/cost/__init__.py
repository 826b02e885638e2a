"""What a compiled program costs: memory, traffic, cycles and FLOP; and the least time by a chip's figures."""

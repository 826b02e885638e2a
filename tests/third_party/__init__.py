"""Models of other people's packages, as they are, sharded from outside and compared with one device; minutes."""

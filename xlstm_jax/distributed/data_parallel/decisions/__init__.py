"""What is decided about a leaf, and why: the dim to split, the reason where there is none, the box that tells both."""

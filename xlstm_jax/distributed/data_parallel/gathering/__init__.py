"""How a leaf is gathered and its gradient scattered: what is sent, one array, trees of them, and layers ahead."""

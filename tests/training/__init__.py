"""Steps, states, losses, evaluation, and what checks them."""

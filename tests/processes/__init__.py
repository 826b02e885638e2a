"""Several processes that join, agree and leave."""

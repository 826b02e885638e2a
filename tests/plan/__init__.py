"""What will be sharded, and how, before it is."""

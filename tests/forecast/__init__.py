"""What a step will need and take: compiled programs read, priced and searched."""

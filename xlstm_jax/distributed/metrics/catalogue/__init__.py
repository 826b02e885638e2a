"""Ready metrics: sums and means, classification, ranking."""

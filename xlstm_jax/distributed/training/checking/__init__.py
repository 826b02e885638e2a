"""What users hand in, looked at: arguments, what processes pass, and mistakes that would run."""

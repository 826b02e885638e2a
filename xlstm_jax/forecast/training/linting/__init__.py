"""Lint of a compiled step: findings about needless traffic and memory, and the rules behind the findings."""

"""Chips, their networks, and their compilers' options."""

"""Tests on one NVIDIA GPU: ``make test-gpu``. Without a GPU the command prints a message and succeeds."""

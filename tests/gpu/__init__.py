"""What only a card can say, on one NVIDIA GPU: ``make test-gpu``. Where there is none it says so and fails nothing."""

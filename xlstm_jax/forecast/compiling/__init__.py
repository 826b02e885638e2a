"""Steps compiled for devices that need not be there: here for a CPU, or in a child process for a topology."""

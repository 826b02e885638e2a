"""An optimizer's state in the memory of the host: where it lies, and how the update has it come and go."""

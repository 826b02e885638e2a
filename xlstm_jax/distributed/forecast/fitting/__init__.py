"""The search for options of a step that fit a device, the fastest first."""

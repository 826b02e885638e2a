"""``check_step``: one step on the mesh beside one device, what differs by more than rounding, and why."""

"""``check_step``: compares a step on the mesh with one device, and names the causes of differences beyond rounding."""

"""A step beside one device: what that computes, what is the same to rounding, and what to say of the rest."""

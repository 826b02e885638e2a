"""What is looked at before a step is paid for: its arguments, what stays whole, and the step beside one device."""

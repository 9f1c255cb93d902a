"""Loss, optimizer, step, metrics and the loop."""

"""From text to micro-batches."""

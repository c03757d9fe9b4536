"""Settings of a run: flags, DeepSpeed JSON, methods, and their checks."""

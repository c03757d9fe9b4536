"""Where replicas are and how they exchange tensors."""

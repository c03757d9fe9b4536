"""What is below the training: CPU patches, private names of DeepSpeed and FSDP2."""

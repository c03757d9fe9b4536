"""What trains inside a replica."""

"""What `multihead show` prints."""

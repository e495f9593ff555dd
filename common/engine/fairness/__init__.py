"""What keeps one API key from using what others need."""

"""What clients leave on the server: responses, conversations and files, bounded together and fair between owners."""

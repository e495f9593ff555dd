"""Routes for operation: health, metrics, tokenizer, development, SageMaker."""

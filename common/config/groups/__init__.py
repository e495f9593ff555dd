"""One group of settings per file: dataclasses whose fields are flags."""

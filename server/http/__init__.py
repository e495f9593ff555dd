"""What all routes share: state, bodies, answers whole and streamed, and the work of one HTTP request."""

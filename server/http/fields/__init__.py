"""Fields that request and response bodies of several APIs share."""

"""The playground: an HTTP server, its request scheduler, and the processes that hold the models."""

"""The parts of tools/mutate.py: what it mutates, which tests are near, and the processes that run them."""

"""Side by side with the others: time, memory and growth, measured in one process. Never imported by the library."""

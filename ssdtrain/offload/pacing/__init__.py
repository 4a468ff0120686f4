"""When transfers begin, how many there are at a time, and what the end of an engine waits for."""

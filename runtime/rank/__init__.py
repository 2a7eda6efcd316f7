"""One rank: a process that runs an engine in step with its twin and answers to the proxy."""

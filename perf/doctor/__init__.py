"""What of a machine will work, what will not, and what to do: facts, the probes that find them, and their judgement."""

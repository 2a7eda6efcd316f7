"""One module an API: its bodies to requests of the engine, and answers in its shape. What an answer means is told elsewhere."""

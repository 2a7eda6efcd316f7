"""The splitter: a converted directory to one directory a tensor-parallel rank."""

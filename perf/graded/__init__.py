"""Questions with answers that a program can grade: what ships, how a server is asked, and how two runs compare."""

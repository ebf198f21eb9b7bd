"""The server's half of a round: who is asked, what may come in, what is kept."""

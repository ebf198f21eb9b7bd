"""The server's side of a round: sampling, checks of replies, and the journal."""

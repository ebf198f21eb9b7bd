"""What follows a merge: runs with clients that have trained, and their tables."""

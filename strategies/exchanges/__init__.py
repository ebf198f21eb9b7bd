"""The exchanges and steps of algorithms that need a file of their own."""

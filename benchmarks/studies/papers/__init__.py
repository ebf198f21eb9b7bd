"""Every table and figure of the papers: what of it was found here."""
